#include "kernels.h"
#if defined(__AVXVNNI__)
#define MS_ISA ms_avxvnni
#define MS_KERNELS avxvnni_kernels
#define MS_NAME "avxvnni"
#include "kernels.inl"
#else
const ms::Kernels* ms::avxvnni_kernels() { return nullptr; }
#endif
