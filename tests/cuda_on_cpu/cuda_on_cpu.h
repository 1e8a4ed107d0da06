// cuda_on_cpu.h -- TEST ONLY. What a host C++ compiler needs to build kernels/*.cu unchanged (g++ -include).
// The threads of a block take turns on one OS thread (cuda_on_cpu.cpp); an intrinsic that is missing here is a
// compile error.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#define EVERMOE_ON_CPU 1
#define __global__
#define __grid_constant__
#define __device__
#define __syncthreads() emulated_sync_block(__LINE__)
#define __syncwarp() emulated_sync_warp(__LINE__, 0xffffffffu, 0, nullptr)
#define __match_any_sync(mask, value) emulated_match_any(__LINE__, mask, value)
#define __shfl_down_sync(mask, value, delta) emulated_shuffle_down(__LINE__, mask, value, delta)

struct Index { unsigned x; };
extern thread_local Index threadIdx, blockIdx, blockDim, gridDim;
unsigned char* emulated_shared();
void emulated_sync_block(int line);
// Waits for the lanes of the mask to come to the same line; what each brought is in got[lane].
void emulated_sync_warp(int line, unsigned mask, uint64_t mine, uint64_t* got);

template <class To, class From> inline To bit_copy(From from) {
  static_assert(sizeof(To) >= sizeof(From), "would lose bits");
  To to{};
  memcpy(&to, &from, sizeof(From));
  return to;
}
inline unsigned emulated_match_any(int line, unsigned mask, unsigned value) {
  uint64_t got[32];
  emulated_sync_warp(line, mask, value, got);
  unsigned equals = 0;
  for (unsigned lane = 0; lane < 32; ++lane) equals |= unsigned(got[lane] == value) << lane;
  return equals & mask;
}
inline float emulated_shuffle_down(int line, unsigned mask, float value, unsigned delta) {
  uint64_t got[32];
  emulated_sync_warp(line, mask, bit_copy<uint64_t>(value), got);
  const unsigned from = threadIdx.x % 32 + delta;
  return from < 32 ? bit_copy<float>(uint32_t(got[from])) : value;
}
template <class T> inline T atomicAdd(T* place, T value) {
  const T old = *place;
  *place += value;
  return old;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(uint32_t bits) { return bit_copy<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bit_copy<uint32_t>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }  // with -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float emulated_half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t emulated_float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline uint16_t emulated_float_to_bf16(float value) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  if (value != value) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
