"""What a Gluon kernel for Hopper computes, in plain torch, with its partitions in random turns.

Gluon has no interpreter. This one runs a kernel's own functions with stand-ins for what they call. Whatever is
asynchronous on a GPU happens late, in an order drawn by a seed: copies by TMA, and products of matrices, which read
shared memory when they are computed and not when they are started. What ordinary stores wrote to shared memory these do
not see before a fence. So a barrier that is missing, or that is awaited in a wrong phase, shows as a wrong result or as
a deadlock, for some seed. What the threads of one partition owe each other is not modelled.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gluon_memory import Barrier, Barriers, Machine, Partition, Pointer, Shared, load, store, where
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# What other partitions may run before.
WAITS = {"mbarrier.wait", "mbarrier.arrive", "warpgroup_mma", "warpgroup_mma_wait"}


@dataclass
class Product:
    """An accumulator that tensor cores may be at work on: of no use before it has been awaited."""

    value: torch.Tensor | None = None


def passed(argument: Any) -> Any:
    """An argument of a launch as a kernel gets it."""
    if isinstance(argument, torch.Tensor):
        length = argument.untyped_storage().nbytes() // argument.itemsize - argument.storage_offset()
        return Pointer(argument.as_strided((length,), (1,), argument.storage_offset()))
    if isinstance(argument, TensorDescriptor):
        base = argument.base
        return types.SimpleNamespace(base=base, block_shape=argument.block_shape, dtype=base.dtype)
    return argument


def largest(values: torch.Tensor, axis: int) -> torch.Tensor:
    """NaN is passed over, as Triton does."""
    if not values.is_floating_point():
        return values.amax(axis)
    return torch.where(values.isnan(), -torch.inf, values).amax(axis)


def of_two(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of two tensors that also takes numbers."""
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


class InTurns(ast.NodeTransformer):
    """A kernel's function as a generator, which yields what it waits for.

    ``a += b`` names another number in Gluon, where it changes a tensor of torch that others may have.
    """

    def __init__(self, functions: set[str]) -> None:
        self.waits = functions | WAITS

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.YieldFrom(node) if ast.unparse(node.func) in self.waits else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        assert node.value is not None
        return ast.Assign([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        return ast.Assign([node.target], ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        # A generator even if it waits for nothing.
        node.body.insert(0, ast.parse("yield from ()").body[0])
        return node


def rebuilt(function: types.FunctionType, names: dict[str, Any], functions: set[str]) -> Any:
    """A kernel's function as a generator, which finds other things under the names of its module."""
    tree = InTurns(functions).visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    ast.increment_lineno(ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1)
    found: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), names, found)
    return found[function.__name__]


@dataclass
class Program:
    """What a kernel's functions find in the places of Gluon's, for one program."""

    machine: Machine
    grid: tuple[int, ...]
    place: tuple[int, ...]
    barriers: list[Barrier] = field(default_factory=list)

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        """Shared memory, or barriers."""
        if dtype != torch.int64:
            return Shared.unwritten(dtype, tuple(shape), self.machine)
        made = Barriers(shape[0])
        self.barriers += made.all
        return made if len(shape) == 2 else made.all[0]

    def specialize(self, partitions: list[tuple[Callable[..., Partition], Any]], warps: Any, registers: Any) -> None:
        """Run all partitions."""
        self.machine.run([function(*arguments) for function, arguments in partitions])

    def fence(self) -> None:
        """For what this partition wrote."""
        for shared in self.machine.written[self.machine.me]:
            shared.fence()
        self.machine.written[self.machine.me].clear()

    def init(self, barrier: Barrier, count: int) -> None:
        """A barrier of so many arrivals."""
        barrier.count = barrier.missing = count

    def wait(self, barrier: Barrier, phase: Any) -> Partition:
        """For the end of the barrier's phase of this parity."""
        yield lambda: barrier.phase % 2 != int(phase)

    def arrive(self, barrier: Barrier, count: int) -> Partition:
        """At a barrier."""
        barrier.missing -= count
        barrier.settle()
        yield lambda: True

    def expect(self, barrier: Barrier, size: int) -> None:
        """Arrive, and let the barrier wait for bytes as well."""
        barrier.bytes += size
        barrier.missing -= 1
        barrier.settle()

    def copy(self, desc: Any, place: list[Any], barrier: Barrier, to: Shared) -> None:
        """Start a copy of a box; what lies behind the tensor is 0."""
        row, column = map(int, place)
        assert list(to.shape) == list(desc.block_shape)

        def arrives() -> None:
            found = desc.base[row : row + to.shape[0], column : column + to.shape[1]]
            found = torch.nn.functional.pad(found, (0, 0, 0, to.shape[0] - len(found)))
            for view in range(2):
                to.write(found, view)
            barrier.bytes -= found.nbytes
            barrier.settle()

        self.machine.copies.append(arrives)

    def multiply(self, a: Any, b: Any, into: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        """Start a product."""
        assert is_async
        made = Product()

        def compute() -> None:
            left, right = (one if isinstance(one, torch.Tensor) else one.read(1) for one in (a, b))
            before = into.value if isinstance(into, Product) else into
            assert before is not None, "products of a partition are computed in their order"
            made.value = left.float() @ right.float() + before * use_acc

        self.machine.products[self.machine.me].append(compute)
        yield lambda: True
        return made

    def await_products(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        """Until no more than so many of this partition's products are outstanding."""
        queue = self.machine.products[self.machine.me]
        yield lambda: len(queue) <= outstanding
        assert all(one.value is not None for one in deps if isinstance(one, Product)), "not waited for long enough"
        found = tuple(one.value if isinstance(one, Product) else one for one in deps)
        return found[0] if len(found) == 1 else found

    def language(self) -> dict[str, Any]:
        """By the names that the kernel's modules know."""
        gl = types.SimpleNamespace(
            **{name: getattr(torch, name) for name in ("float32", "int32", "int64", "exp2", "log2")},
            **{name: lambda *_: None for name in ("BlockedLayout", "SliceLayout", "thread_barrier")},
            allocate_shared_memory=self.allocate,
            arange=lambda first, end, layout: torch.arange(first, end),
            associative_scan=lambda values, axis, add: values.cumsum(axis),
            convert_layout=lambda value, layout: value,
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            inline_asm_elementwise=lambda *_, **__: torch.tensor(0),
            load=load,
            max=largest,
            maximum=of_two(torch.fmax),
            minimum=of_two(torch.fmin),
            num_programs=lambda axis: self.grid[axis],
            program_id=lambda axis: torch.tensor(self.place[axis]),
            static_range=range,
            store=store,
            sum=lambda values, axis: values.sum(axis),
            to_tensor=torch.as_tensor,
            warp_specialize=self.specialize,
            where=where,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        )
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=self.init, wait=self.wait, arrive=self.arrive, expect=self.expect
        )
        return {
            "gl": gl,
            "mbarrier": mbarrier,
            "tma": types.SimpleNamespace(async_copy_global_to_shared=self.copy),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.await_products,
            "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
        }


class Kernel:
    """Launched as a Gluon kernel is, program after program.

    Args:
        kernel: in whose place it is.
        seed: of the first program's turns.

    Attributes:
        launches: the grid of each.
    """

    def __init__(self, kernel: Any, seed: int) -> None:
        self.function, self.seed = kernel.fn, seed
        self.launches: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches.append(grid)
            given = list(map(passed, arguments))
            constants = {name: value for name, value in constants.items() if name.isupper()}
            for number in range(grid[0] * grid[1]):
                self.seed += 1
                program = Program(Machine(self.seed), grid, (number % grid[0], number // grid[0]))
                list(self._rebound(program.language())(*given, **constants))
                assert not any(barrier.bytes for barrier in program.barriers), "copies that nobody waited for"

        return launch

    def _rebound(self, language: dict[str, Any]) -> Any:
        """The kernel, which finds the language's stand-ins, as do the functions that it calls in any module."""
        modules: dict[str, tuple[dict[str, Any], set[str]]] = {}

        def rebound(function: types.FunctionType) -> Any:
            module = function.__globals__["__name__"]
            if module not in modules:
                known = function.__globals__.items()
                functions = {name: value.fn for name, value in known if hasattr(value, "fn")}
                names = {name: getattr(value, "value", value) for name, value in known} | language
                modules[module] = names, set(functions)
                names |= {name: rebound(value) for name, value in functions.items()}
            return rebuilt(function, *modules[module])

        return rebound(self.function)
