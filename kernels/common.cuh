// common.cuh -- what the kernels share: index helpers, and floats of every row type as float32.
//
// Rules. Kernels take raw pointers and 64-bit numbers only; no headers of torch or CUDA libraries, so that any
// nvcc builds them, and g++ does for the tests (tests/cuda_on_cpu). Indices are size_t before they are
// multiplied. Inline PTX stays in this file, with a stand-in under EVERMOE_ON_CPU. Products and sums are rounded
// one by one (no fused multiply-add), so that the CPU's arithmetic in src/cpu gives the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef EVERMOE_ON_CPU
#define EVERMOE_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulated_shared())
#else
#define EVERMOE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline size_t global_thread() { return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline size_t num_threads() { return static_cast<size_t>(gridDim.x) * blockDim.x; }

// ---- row types: 16-bit floats are carried as their bits ------------------------------------------
struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(Bf16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }
#ifdef EVERMOE_ON_CPU
__device__ inline float to_float(Fp16 value) { return emulated_half_to_float(value.bits); }
__device__ inline uint16_t bf16_bits(float value) { return emulated_float_to_bf16(value); }
__device__ inline uint16_t fp16_bits(float value) { return emulated_float_to_half(value); }
#else
__device__ inline float to_float(Fp16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ inline uint16_t bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline uint16_t fp16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

template <typename Row> __device__ inline Row from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline Bf16 from_float<Bf16>(float value) { return {bf16_bits(value)}; }
template <> __device__ inline Fp16 from_float<Fp16>(float value) { return {fp16_bits(value)}; }

// kCount elements that are loaded and stored at once.
template <typename Row, int kCount> struct alignas(sizeof(Row) * kCount) Pack { Row at[kCount]; };
