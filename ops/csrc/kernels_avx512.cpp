#include "kernels.h"
#if defined(__AVX512VNNI__)
#define MS_ISA ms_avx512
#define MS_KERNELS avx512_kernels
#define MS_NAME "avx512"
#include "kernels.inl"
#else
const ms::Kernels* ms::avx512_kernels() { return nullptr; }
#endif
