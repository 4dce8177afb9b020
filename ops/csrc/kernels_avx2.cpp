#include "kernels.h"
#if defined(__AVX2__)
#define MS_ISA ms_avx2
#define MS_KERNELS avx2_kernels
#define MS_NAME "avx2"
#include "kernels.inl"
#else
const ms::Kernels* ms::avx2_kernels() { return nullptr; }
#endif
