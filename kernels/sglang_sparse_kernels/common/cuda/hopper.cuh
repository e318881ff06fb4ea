// What CUDA C++ has no words for without its headers, for all kernels here; tests on a CPU bring their own.

#define ALL 0xFFFFFFFFu

#ifdef __CUDACC__
#define SHARED(type, name) __shared__ type name
// Of more bytes than a kernel has without asking; the launch says how many.
#define DYNAMIC_SHARED(type, name)                          \
    extern __shared__ __align__(1024) unsigned char bytes[]; \
    type& name = *(type*)bytes

// PTX of Hopper and later, left out before.
#if __CUDA_ARCH__ >= 900
#define HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER(...)
#endif

__device__ void launch_dependents() { HOPPER("griddepcontrol.launch_dependents;"); }

__device__ void await_inputs() { HOPPER("griddepcontrol.wait;" ::: "memory"); }

// All threads of the cluster come here before any of them leaves `cluster_wait`.
__device__ void cluster_arrive() { HOPPER("barrier.cluster.arrive.relaxed;" ::: "memory"); }

__device__ void cluster_wait() { HOPPER("barrier.cluster.wait.acquire;" ::: "memory"); }

// From here on, all threads of the cluster see what each block has written to its own shared memory. The barrier's own
// release would wait for global memory as well, as the only fence does that compilers before CUDA 12.8 know.
__device__ void cluster_barrier() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
    HOPPER("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
#else
    HOPPER("fence.acq_rel.cluster;" ::: "memory");
#endif
    cluster_arrive();
    cluster_wait();
}

// The number at `place`, in this block's shared memory, as the block `rank` of the cluster has it.
__device__ unsigned load_from(unsigned rank, const unsigned* place) {
    unsigned value = 0, own = (unsigned)__cvta_generic_to_shared(place);
    HOPPER("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.u32 %0, [there];\n}"
           : "=r"(value) : "r"(own), "r"(rank) : "memory");
    return value;
}
#endif
