// probe.cu -- TEST ONLY. Small kernels to which tests/python/kernels/test_emulator.py knows the answer, some of them wrong on purpose.
#include <cstddef>
#include <cstdint>

// out[t] = the shuffle of lane numbers, one row a kind
extern "C" __global__ void shuffles(int32_t* out) {
  const int32_t lane = threadIdx.x % 32;
  int32_t* const mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(~0u, lane, 5);
  mine[1] = __shfl_up_sync(~0u, lane, 3);
  mine[2] = __shfl_down_sync(~0u, lane, 3);
  mine[3] = __shfl_xor_sync(~0u, lane, 1);
  mine[4] = __shfl_down_sync(~0u, lane, 1, 8);
  mine[5] = __shfl_xor_sync(~0u, lane, 4, 8);
  mine[6] = static_cast<int32_t>(__ballot_sync(~0u, lane % 3 == 0));
  mine[7] = __reduce_max_sync(~0u, lane * 7 % 32);
}
// Lanes of both halves meet separately; the double is shuffled as one value.
extern "C" __global__ void halves(double* out) {
  const bool low = threadIdx.x % 32 < 16;
  if (low) out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x + 0.5, 1);
  else out[threadIdx.x] = __shfl_sync(0xffff0000u, threadIdx.x + 0.25, 17);
}
// Lanes that have exited are not waited for.
extern "C" __global__ void early(uint32_t* out) {
  if (threadIdx.x % 2) return;
  out[threadIdx.x] = __match_any_sync(~0u, threadIdx.x % 4);
}
constexpr unsigned kThreads = 64;
// Static shared memory of a template: the block's values reversed.
template <typename T> __device__ void reversed(const T* in, T* out, bool with_barrier) {
  __shared__ T values[64];
  values[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  if (with_barrier) __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = values[63 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) reversed_i16(const int16_t* in, int16_t* out, bool with_barrier) {
  reversed(in, out, with_barrier);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2) reversed_i64(const int64_t* in, int64_t* out, bool with_barrier) {
  reversed(in, out, with_barrier);
}
// Counts past what it has.
extern "C" __global__ void too_long(uint32_t* out, size_t count) {
  __shared__ uint32_t values[4];
  if (threadIdx.x < count) values[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x < 4) out[threadIdx.x] = values[threadIdx.x];
}
// Writes of one half of a warp are seen by the other after __syncwarp, by the other warp only after __syncthreads.
extern "C" __global__ void neighbours(uint32_t* out, size_t distance) {
  __shared__ uint32_t values[64];
  values[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ distance];
}
extern "C" __global__ void shuffle_is_no_barrier(uint32_t* out) {
  __shared__ uint32_t values[32];
  values[threadIdx.x] = threadIdx.x;
  __shfl_xor_sync(~0u, threadIdx.x, 1);
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}
// Blocks of one launch are not ordered, whatever they do.
extern "C" __global__ void from_block_to_block(uint32_t* out) {
  if (threadIdx.x == 0) out[1 + blockIdx.x] = out[blockIdx.x] + 1;
}
struct Table { uint8_t bytes[300]; };
extern "C" __global__ void many(uint32_t* out, uint8_t a, uint16_t b, uint32_t c, uint64_t d, float e, double f,
                                uint64_t g, uint64_t h, uint64_t i, uint64_t j, uint64_t k, const __grid_constant__ Table table) {
  if (threadIdx.x == 0) out[0] = a + b + c + d + e + f + g + h + i + j + k + table.bytes[299];
}
extern "C" __global__ void atomics(uint32_t* out, float* sum) {
  atomicMax(&out[0], threadIdx.x);
  atomicMin(&out[1], threadIdx.x);
  atomicOr(&out[2], 1u << threadIdx.x % 32);
  atomicCAS(&out[3], 7u, 8u);
  atomicExch(&out[4], 5u);
  atomicAdd(sum, 0.5f);
}
extern "C" __global__ void atomic_and_plain(uint32_t* out) {
  if (threadIdx.x == 3) out[0] = 1; else atomicAdd(&out[0], 1u);
}
extern "C" __global__ void writes_a_constant(uint32_t* out) {
  static const uint32_t kValues[2] = {1, 2};
  if (threadIdx.x == 0) const_cast<uint32_t*>(kValues)[out[0]] = 3;
}
// out[i] = 1 + ... + (i + 1), block by block: each waits for the sum of the previous one, which it may do only if it
// knows that the previous one has begun, as a ticket shows. A state is twice the sum, plus 1 when it is present.
extern "C" __global__ void running_sums(unsigned long long* states, uint32_t* next_ticket, uint32_t* out, size_t with_tickets,
                                        size_t with_wait) {
  if (threadIdx.x > 0) return;
  const uint32_t i = with_tickets ? atomicAdd(next_ticket, 1u) : blockIdx.x;
  unsigned long long before = i > 0 ? 0 : 1;
  while (i > 0 && before % 2 == 0) {
    before = atomicAdd(&states[i - 1], 0ull);
    if (!with_wait) break;
  }
  const unsigned long long sum = before / 2 + i + 1;
  atomicExch(&states[i], 2 * sum + 1);
  out[i] = static_cast<uint32_t>(sum);
}
// Wrong unless block 0 comes first.
extern "C" __global__ void first_block_clears(uint32_t* out) {
  if (threadIdx.x > 0) return;
  if (blockIdx.x == 0) atomicExch(out, 0u);
  atomicAdd(out, 1u);
}
// Wrong if anything comes between two atomics.
extern "C" __global__ void two_atomics_for_one(uint32_t* out) {
  if (threadIdx.x == 0) atomicExch(out, atomicAdd(out, 0u) + 1);
}
// Static and dynamic shared memory of blocks that run at once: each has its own.
extern "C" __global__ void own_shared_memory(uint32_t* out, uint32_t* unused) {
  __shared__ uint32_t fixed[64];
  uint32_t* const dynamic = reinterpret_cast<uint32_t*>(emulated_shared());
  fixed[threadIdx.x] = dynamic[threadIdx.x] = blockIdx.x * 64 + threadIdx.x;
  atomicAdd(unused, 1u);
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = fixed[63 - threadIdx.x] + dynamic[63 - threadIdx.x];
}
