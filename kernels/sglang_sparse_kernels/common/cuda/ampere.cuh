// PTX of Ampere and later (`of_e4m3`: of Ada) that several kernels use; products of numbers of 16 bits are in
// products.cuh. Tests on a CPU bring their own.

#ifdef __CUDACC__
__device__ float exp2_of(float number) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(number));
    return power;
}

__device__ float log2_of(float number) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(number));
    return logarithm;
}

// Four numbers of float8 as float16.
__device__ uint2 of_e4m3(unsigned bits) {
    uint2 both = {};
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}" : "=r"(both.x), "=r"(both.y) : "r"(bits));
#endif
    return both;
}

__device__ float of_float16(unsigned bits) {
    float number;
    asm("{\n.reg .b16 half;\ncvt.u16.u32 half, %1;\ncvt.f32.f16 %0, half;\n}" : "=f"(number) : "r"(bits));
    return number;
}

// 16 bytes that are read once. Volatile, so that all of such loads are on their way before the first of them is used.
__device__ uint4 load(const unsigned char* place) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(place) : "memory");
    return words;
}

// In shared memory.
typedef unsigned Place;

__device__ Place place_of(const void* memory) { return (Place)__cvta_generic_to_shared(memory); }

// 16 bytes from global to shared memory, or zeros.
__device__ void copy(Place target, const unsigned char* source, bool held) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(target), "l"(source), "r"(held ? 16 : 0) : "memory");
}

__device__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all copies of this thread have arrived but those of the last `LATER` groups.
template <int LATER> __device__ void await_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory"); }

// Four matrices of 8 rows of 16 bytes, each lane knowing the place of a row; it gets 4 bytes of each matrix.
__device__ void load_matrices(Place place, unsigned (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place));
}

// The same of matrices whose rows and columns change places.
__device__ void load_transposed(Place place, unsigned (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(place));
}

// A matrix of 8 by 8 numbers of two bytes, of which each lane has two of a row, likewise.
__device__ unsigned transpose(unsigned words) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(words));
    return transposed;
}

// 16 rows by 32 bytes, times 32 signed bytes by 8 columns.
__device__ void multiply_bytes(int (&sums)[4], const unsigned (&rows)[4], uint2 columns) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns.x), "r"(columns.y));
}

// Hides where a number comes from: what depends on the thread alone, the compiler would compute anew for every tile.
__device__ void keep(unsigned& number) { asm("" : "+r"(number)); }

template <typename Type> __device__ void keep(const Type*& pointer) { asm("" : "+l"(pointer)); }
#endif
