// common.cuh -- shared parts of the kernels: index helpers, and floats of every row type as float32.
//
// Rules. Kernels take only raw pointers and 64-bit numbers, and use no headers of torch or CUDA libraries, so that any
// nvcc can compile them, and g++ for the tests (tests/emulator). Indices are converted to size_t before they are
// multiplied. Inline PTX stays in this file, with a stand-in under EVERMOE_ON_CPU. Products and sums are rounded one by
// one (no fused multiply-add), so that the CPU's arithmetic in src/cpu produces the same bits.
#pragma once
#include "abi.h"

#ifdef EVERMOE_ON_CPU
#define EVERMOE_DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulated_shared())
#else
#define EVERMOE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline size_t global_thread() { return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline size_t num_threads() { return static_cast<size_t>(gridDim.x) * blockDim.x; }

// ---- indices ------------------------------------------------------------------------------------
// Row ids and positions are int32, or int64 if `wide` is not 0: all threads take the same branch, and one kernel serves
// both.
__device__ inline int64_t index_at(const void* indices, size_t i, size_t wide) {
  return wide ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}
__device__ inline void set_index(void* indices, size_t i, size_t wide, int64_t value) {
  if (wide) static_cast<int64_t*>(indices)[i] = value; else static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(value);
}

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

// ---- e4m3: two numbers in the bits of a word, the first one in the lower half --------------------
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Rounded to nearest, ties to even; 448 for larger numbers, 0x7f for NaN.
__device__ inline uint16_t e4m3_bits(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ inline void e4m3_to_floats(uint16_t bits, float& low, float& high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
  low = to_float(Fp16{static_cast<uint16_t>(halves)});
  high = to_float(Fp16{static_cast<uint16_t>(halves >> 16)});
}
#else
__device__ inline uint32_t e4m3_of(float value) {
  const uint32_t all = __float_as_uint(value), bits = all & 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7f;
  uint32_t number;
  if (bits < (127u - 6) << 23) {  // below 2^-6: multiples of 2^-9, by an addition that rounds to ones
    number = __float_as_uint(__fadd_rn(__fmul_rn(__uint_as_float(bits), 512.0f), 8388608.0f)) & 0xf;
  } else {
    number = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127u - 7) << 3);
    if (number > 0x7e) number = 0x7e;
  }
  return number | (all >> 24 & 0x80);
}
__device__ inline uint16_t e4m3_bits(float low, float high) {
  return static_cast<uint16_t>(e4m3_of(low) | e4m3_of(high) << 8);
}
__device__ inline float e4m3_to_float(uint32_t number) {
  const uint32_t magnitude = number & 0x7f;
  float value = __uint_as_float((magnitude << 20) + ((127u - 7) << 23));
  if (magnitude < 8) value = __fmul_rn(__uint2float_rn(magnitude), 1.0f / 512);
  if (magnitude == 0x7f) value = __uint_as_float(0x7fc00000u);
  return __uint_as_float(__float_as_uint(value) | (number & 0x80) << 24);
}
__device__ inline void e4m3_to_floats(uint16_t bits, float& low, float& high) {
  low = e4m3_to_float(bits & 0xffu);
  high = e4m3_to_float(bits >> 8);
}
#endif

// kCount elements that are loaded and stored at once.
template <typename Row, int kCount> struct alignas(sizeof(Row) * kCount) Pack { Row at[kCount]; };

// The same in the form in which it is loaded: words that are not divided until an element is needed. With elements of
// 16 bits the compiler would split a load immediately, and so wait for it before it begins the next.
template <typename Row, int kCount, bool kWords = sizeof(Row) * kCount % 4 == 0> struct alignas(sizeof(Row) * kCount) Loaded {
  uint32_t words[sizeof(Row) * kCount / 4];
  __device__ float at(int i) const;
};
template <typename Row, int kCount> struct Loaded<Row, kCount, false> {
  Row only[kCount];
  __device__ float at(int i) const { return to_float(only[i]); }
};
__device__ inline float element_of(const uint32_t* words, int i, float) { return __uint_as_float(words[i]); }
__device__ inline float element_of(const uint32_t* words, int i, Bf16) {
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}
__device__ inline float element_of(const uint32_t* words, int i, Fp16) {
  return to_float(Fp16{static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2))});
}
template <typename Row, int kCount, bool kWords> __device__ inline float Loaded<Row, kCount, kWords>::at(int i) const {
  return element_of(words, i, Row{});
}

// Returns value / by; a 64-bit division takes several times as long as a 32-bit one.
__device__ inline size_t quotient_of(size_t value, size_t by) {
  return ((value | by) >> 32) == 0 ? static_cast<uint32_t>(value) / static_cast<uint32_t>(by) : value / by;
}

// ---- rows -----------------------------------------------------------------------------------------
// A group of threads takes a row: one thread per unit of the row, rounded up to a power of two, at least `least` and at
// most `most` or a block (all powers of two). Example, blocks of 256: rows of 3 units are taken by 4 threads each, 64
// rows per block; with `least` 32, by a warp each, 8 rows per block.
struct RowGroup {
  size_t index, count;     // which group of how many in the grid
  size_t thread, threads;  // which thread of how many in the group
};
__device__ inline RowGroup row_group(size_t units, unsigned least = 1, unsigned most = 1024) {
  unsigned shift = 0;
  while (1u << shift < least || ((size_t{1} << shift) < units && (2u << shift) <= most && (2u << shift) <= blockDim.x)) ++shift;
  const size_t threads = size_t{1} << shift;
  return {global_thread() >> shift, num_threads() >> shift, threadIdx.x & (threads - 1), threads};
}

// Whether addresses and row size are multiples of `bytes`.
__device__ inline bool multiples_of(size_t bytes, const void* one, const void* two, const void* three, size_t row_bytes) {
  const auto number = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  return ((number(one) | number(two) | number(three) | row_bytes) & (bytes - 1)) == 0;
}

template <typename Unit, typename Source>
__device__ inline void copy_rows_by(const void* __restrict__ rows, void* __restrict__ out, size_t num_out, size_t row_bytes,
                                    size_t num_rows, Source source_of) {
  const size_t units = row_bytes / sizeof(Unit);
  const RowGroup group = row_group(units);
  for (size_t first = group.index * kInFlight; first < num_out; first += group.count * kInFlight) {
    const Unit* from[kInFlight];  // null: zeros
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      const size_t row = first + r < num_out ? source_of(first + r) : num_rows;
      from[r] = row < num_rows ? static_cast<const Unit*>(rows) + row * units : nullptr;
    }
    for (size_t u = group.thread; u < units; u += group.threads) {
      Unit values[kInFlight];
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) values[r] = from[r] ? from[r][u] : Unit{};
#pragma unroll
      for (int r = 0; r < kInFlight; ++r)
        if (first + r < num_out) static_cast<Unit*>(out)[(first + r) * units + u] = values[r];
    }
  }
}
// Writes out[i] = rows[source_of(i)], zeros if that is num_rows or more; row_bytes is even. It uses the widest units
// that addresses and row size allow. Launch: 1-D grid of any size, blocks of a power of two.
template <typename Source>
__device__ inline void copy_rows(const void* __restrict__ rows,  // [num_rows, row_bytes]  device
                                 void* __restrict__ out,         // [num_out, row_bytes]   device, written
                                 size_t num_out, size_t row_bytes, size_t num_rows, Source source_of) {
  if (multiples_of(16, rows, out, nullptr, row_bytes)) {
    copy_rows_by<Pack<uint32_t, 4>>(rows, out, num_out, row_bytes, num_rows, source_of);
  } else if (multiples_of(8, rows, out, nullptr, row_bytes)) {
    copy_rows_by<Pack<uint32_t, 2>>(rows, out, num_out, row_bytes, num_rows, source_of);
  } else if (multiples_of(4, rows, out, nullptr, row_bytes)) {
    copy_rows_by<uint32_t>(rows, out, num_out, row_bytes, num_rows, source_of);
  } else {
    copy_rows_by<uint16_t>(rows, out, num_out, row_bytes, num_rows, source_of);
  }
}

// ---- counts ---------------------------------------------------------------------------------------
__device__ inline int64_t at_least_zero(int64_t count) { return count < 0 ? 0 : count; }
