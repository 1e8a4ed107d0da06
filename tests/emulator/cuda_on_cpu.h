// cuda_on_cpu.h -- TEST ONLY. What a host C++ compiler needs to build kernels/*.cu unchanged (g++ -include).
// The threads of a block take turns on one OS thread (emulator.cpp); an intrinsic that is missing here is a
// compile error: add it at the end of its block.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <type_traits>
#include <utility>

#define EVERMOE_ON_CPU 1
#ifdef EVERMOE_LIST_KERNELS  // build.mk looks for these marks to register the kernels
#define __global__ evermoe_kernel
#define __launch_bounds__(threads, ...) evermoe_bounds<threads>
#else
#define __global__
#define __launch_bounds__(threads, ...)
#endif
#define __grid_constant__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__ static const
// Thread-local memory is shared by the emulated threads, which are one OS thread, and the checks know its bounds.
#define __shared__ static thread_local

// ---- the launch: kernels are called as cuLaunchKernel does, with an address for each parameter ---
#define EVERMOE_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
namespace emulator {
struct Kernel {
  const char* name;
  unsigned max_threads;  // of __launch_bounds__
  void (*call)(const Kernel&, void** arguments);
  void (*function)();
  const size_t* sizes;  // of the parameters
  size_t num_parameters;
};
struct Registered { explicit Registered(const Kernel& kernel); };

template <class Function> struct Parameters;
template <class... P> struct Parameters<void(P...)> {
  static constexpr size_t kSizes[] = {sizeof(P)..., 0};
  template <size_t... I> EVERMOE_UNCHECKED static void call(void (*function)(P...), void** arguments, std::index_sequence<I...>) {
    function(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
  }
  EVERMOE_UNCHECKED static void call(const Kernel& kernel, void** arguments) {
    call(reinterpret_cast<void (*)(P...)>(kernel.function), arguments, std::index_sequence_for<P...>{});
  }
  static Kernel kernel(const char* name, unsigned max_threads, void (*function)(P...)) {
    return {name, max_threads, call, reinterpret_cast<void (*)()>(function), kSizes, sizeof...(P)};
  }
};
}  // namespace emulator
#define EVERMOE_KERNEL(name, max_threads)           \
  static const emulator::Registered registered_##name( \
      emulator::Parameters<decltype(name)>::kernel(#name, max_threads, name));

// ---- threads, shared memory and barriers -------------------------------------------------------------
struct Index { unsigned x; };
extern Index threadIdx, blockIdx, blockDim, gridDim;
unsigned char* emulated_shared();
void emulated_sync_block(int line);
// Waits until the lanes of the mask have come to the same line of the same call. What each brought is in got[lane];
// returns the lanes that took part: those of the mask that have not exited.
unsigned emulated_sync_warp(const char* call, int line, unsigned mask, uint64_t mine, uint64_t* got);
[[noreturn]] void emulated_fail_at(int line, const char* message);

#define __syncthreads() emulated_sync_block(__LINE__)
#define __syncwarp(...) emulated_sync_warp("__syncwarp", __LINE__, emulated_mask(__VA_ARGS__), 0, nullptr)
#define __activemask() (1u << threadIdx.x % 32)  // legal, and the least helpful answer
#define __threadfence() ((void)0)                // the checks take no order from it
#define __threadfence_block() ((void)0)
#define __match_any_sync(mask, value) emulated_match_any(__LINE__, mask, value)
#define __ballot_sync(mask, predicate) emulated_ballot("__ballot_sync", __LINE__, mask, predicate)
#define __any_sync(mask, predicate) (emulated_ballot("__any_sync", __LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (emulated_ballot("__all_sync", __LINE__, mask, !(predicate)) == 0)
#define __shfl_sync(mask, value, ...) emulated_shuffle("__shfl_sync", __LINE__, mask, value, __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...) emulated_shuffle("__shfl_up_sync", __LINE__, mask, value, __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) emulated_shuffle("__shfl_down_sync", __LINE__, mask, value, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) emulated_shuffle("__shfl_xor_sync", __LINE__, mask, value, __VA_ARGS__)
#define __reduce_add_sync(mask, value) emulated_reduce("__reduce_add_sync", __LINE__, mask, value, [](auto a, auto b) { return a + b; })
#define __reduce_min_sync(mask, value) emulated_reduce("__reduce_min_sync", __LINE__, mask, value, [](auto a, auto b) { return a < b ? a : b; })
#define __reduce_max_sync(mask, value) emulated_reduce("__reduce_max_sync", __LINE__, mask, value, [](auto a, auto b) { return a > b ? a : b; })
#define __reduce_or_sync(mask, value) emulated_reduce("__reduce_or_sync", __LINE__, mask, value, [](auto a, auto b) { return a | b; })
#define __reduce_and_sync(mask, value) emulated_reduce("__reduce_and_sync", __LINE__, mask, value, [](auto a, auto b) { return a & b; })

template <class To, class From> inline To bit_copy(From from) {
  static_assert(sizeof(To) >= sizeof(From), "would lose bits");
  To to{};
  memcpy(&to, &from, sizeof(From));
  return to;
}
template <class To> inline To narrowed(uint64_t bits) {
  To to;
  memcpy(&to, &bits, sizeof(To));
  return to;
}
inline unsigned emulated_mask(unsigned mask = 0xffffffffu) { return mask; }
template <class T> inline unsigned emulated_match_any(int line, unsigned mask, T value) {
  uint64_t got[32];
  const unsigned took = emulated_sync_warp("__match_any_sync", line, mask, bit_copy<uint64_t>(value), got);
  unsigned equals = 0;
  for (unsigned lane = 0; lane < 32; ++lane) equals |= unsigned(got[lane] == bit_copy<uint64_t>(value)) << lane;
  return equals & took;
}
inline unsigned emulated_ballot(const char* call, int line, unsigned mask, bool predicate) {
  uint64_t got[32];
  const unsigned took = emulated_sync_warp(call, line, mask, predicate, got);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= unsigned(got[lane] != 0) << lane;
  return votes & took;
}
// The lane that a shuffle reads; one outside of the lane's group of `width` reads itself.
inline unsigned emulated_source(const char* call, unsigned lane, unsigned by, unsigned width) {
  const unsigned first = lane / width * width;
  switch (call[7]) {  // __shfl_[u]p, [d]own, [x]or, [s]ync
    case 'u': return lane < first + by ? lane : lane - by;
    case 'd': return lane + by >= first + width ? lane : lane + by;
    case 'x': return (lane ^ by) >= first + width ? lane : lane ^ by;
    default: return first + by % width;
  }
}
template <class T>
inline T emulated_shuffle(const char* call, int line, unsigned mask, T value, unsigned by, unsigned width = 32) {
  uint64_t got[32];
  const unsigned took = emulated_sync_warp(call, line, mask, bit_copy<uint64_t>(value), got);
  const unsigned from = emulated_source(call, threadIdx.x % 32, by, width);
  if (!(took >> from & 1)) emulated_fail_at(line, "a shuffle reads a lane that does not take part");
  return narrowed<T>(got[from]);
}
template <class T, class Add> inline T emulated_reduce(const char* call, int line, unsigned mask, T value, Add add) {
  uint64_t got[32];
  const unsigned took = emulated_sync_warp(call, line, mask, bit_copy<uint64_t>(value), got);
  const unsigned first = __builtin_ctz(took);
  T sum = narrowed<T>(got[first]);
  for (unsigned lane = first + 1; lane < 32; ++lane)
    if (took >> lane & 1) sum = add(sum, narrowed<T>(got[lane]));
  return sum;
}

// ---- atomics: no thread is interrupted, so that a read and a write will do ---------------------------
void emulated_atomic_read(const void* place, void* old, size_t size);
void emulated_atomic_write(void* place, const void* now, size_t size);
template <class T, class Change> inline T emulated_atomic(T* place, Change change) {
  T old;
  emulated_atomic_read(place, &old, sizeof old);
  const T now = change(old);
  emulated_atomic_write(place, &now, sizeof now);
  return old;
}
template <class T> inline T atomicAdd(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return T(old + value); });
}
template <class T> inline T atomicMin(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return std::min(old, value); });
}
template <class T> inline T atomicMax(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return std::max(old, value); });
}
template <class T> inline T atomicOr(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return T(old | value); });
}
template <class T> inline T atomicAnd(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return T(old & value); });
}
template <class T> inline T atomicXor(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return T(old ^ value); });
}
template <class T> inline T atomicExch(T* place, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T) { return value; });
}
template <class T> inline T atomicCAS(T* place, std::common_type_t<T> compare, std::common_type_t<T> value) {
  return emulated_atomic(place, [=](T old) { return old == compare ? value : old; });
}

// ---- loads and stores with hints, vectors ------------------------------------------------------------
template <class T> inline T __ldg(const T* place) { return *place; }
template <class T> inline T __ldcs(const T* place) { return *place; }
template <class T> inline T __ldcg(const T* place) { return *place; }
template <class T> inline void __stcs(T* place, T value) { *place = value; }
template <class T> inline void __stcg(T* place, T value) { *place = value; }
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- bits --------------------------------------------------------------------------------------------
using std::max;
using std::min;
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline int __ffsll(unsigned long long bits) { return __builtin_ffsll((long long)bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(unsigned long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline unsigned __float_as_uint(float value) { return bit_copy<uint32_t>(value); }
inline int __float_as_int(float value) { return bit_copy<int32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return bit_copy<float>(bits); }
inline float __int_as_float(int32_t bits) { return bit_copy<float>(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }

// ---- floats, rounded one by one: with -ffp-contract=off ----------------------------------------------
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __double2float_rn(double a) { return float(a); }
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }
inline float __ll2float_rn(long long a) { return float(a); }
inline float __ull2float_rn(unsigned long long a) { return float(a); }
inline float emulated_half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t emulated_float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline uint16_t emulated_float_to_bf16(float value) {
  const uint32_t bits = bit_copy<uint32_t>(value);
  if (value != value) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
