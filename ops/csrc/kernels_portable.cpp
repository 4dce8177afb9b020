#define MS_ISA ms_portable
#define MS_KERNELS portable_kernels
#define MS_NAME "portable"
#include "kernels.inl"
