// Products of 16 rows with 8 columns by tensor cores, and what their operands are packed of; tests on a CPU bring their
// own.
//
// Compile-time: KIND (of the operands: BFLOAT16, or float16 where it is anything else).

#ifdef __CUDACC__
// Two numbers in the element type of the products; the first one is in the lower half.
__device__ unsigned pack(float first, float second) {
    unsigned both;
    if (KIND == BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// 16 rows by 16 entries, times 16 entries by 8 columns.
__device__ void multiply(float (&sums)[4], const unsigned (&rows)[4], uint2 columns) {
#define MULTIPLY(type)                                                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                  \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                    \
                 : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(columns.x), "r"(columns.y))
    if (KIND == BFLOAT16) MULTIPLY("bf16");
    else MULTIPLY("f16");
#undef MULTIPLY
}
#endif
