// What CUDA C++ has no words for without its headers, for all kernels here; tests on a CPU bring their own.

#define ALL 0xFFFFFFFFu

#ifdef __CUDACC__
#define SHARED(type, name) __shared__ type name

// PTX of Hopper and later, left out before.
#if __CUDA_ARCH__ >= 900
#define HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER(...)
#endif

__device__ void launch_dependents() { HOPPER("griddepcontrol.launch_dependents;"); }

__device__ void await_inputs() { HOPPER("griddepcontrol.wait;" ::: "memory"); }
#endif
