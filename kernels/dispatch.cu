// dispatch.cu -- the plan of a dispatch (a stable counting sort), the copies of rows, and the weighted sum back.
//
// A slot s = t * K + k is one choice of a token. Rows are ordered by (destination rank, expert, slot). -1 means:
// no expert in ids, no slot in row_ids, no row in positions; any other value out of range is treated as -1.
// The plan: plan_count -> plan_segments -> plan_place, on one stream. Caller owns all memory.
#include "common.cuh"

// ---- plan ---------------------------------------------------------------------------------------
// A tile of consecutive slots is one warp's, so that the order within it is the order of the lanes.
constexpr size_t kTileSlots = 512;  // in step with TILE_SLOTS of src/cuda/mod.rs
static_assert(kTileSlots % kWarp == 0, "a warp takes a tile in whole rounds");

// tile_counts[tile, e] = slots of expert e in the tile. Launch: one block of 32 threads per tile, dynamic shared
// memory for num_experts uint32_t. Example, tile of 4, E = 2, ids = [1, 0, 1, 1, 0]: [[1, 3], [1, 0]].
template <typename Id>
__device__ void count_tile(const Id* __restrict__ ids,            // [num_slots]               device
                           uint32_t* __restrict__ tile_counts,    // [num_tiles, num_experts]  device, written
                           size_t num_slots, size_t num_experts) {
  EVERMOE_DYNAMIC_SHARED(unsigned, counts_E);
  for (size_t e = threadIdx.x; e < num_experts; e += kWarp) counts_E[e] = 0;
  __syncwarp();
  const size_t first = blockIdx.x * kTileSlots;
  for (size_t s = first + threadIdx.x; s < first + kTileSlots && s < num_slots; s += kWarp) {
    const Id id = ids[s];
    if (id >= 0 && static_cast<size_t>(id) < num_experts) atomicAdd(&counts_E[id], 1u);
  }
  __syncwarp();
  for (size_t e = threadIdx.x; e < num_experts; e += kWarp) tile_counts[blockIdx.x * num_experts + e] = counts_E[e];
}
extern "C" __global__ void plan_count_i32(const int32_t* ids, uint32_t* tile_counts, size_t num_slots, size_t num_experts) {
  count_tile(ids, tile_counts, num_slots, num_experts);
}
extern "C" __global__ void plan_count_i64(const int64_t* ids, uint32_t* tile_counts, size_t num_slots, size_t num_experts) {
  count_tile(ids, tile_counts, num_slots, num_experts);
}

__device__ inline int64_t at_least_zero(int64_t count) { return count < 0 ? 0 : count; }

// Turns counts into starts. tile_counts[tile, e] becomes the number of e's slots in earlier tiles;
// ends[e, r] = slots of e that go to ranks 0..=r; first_rows[r, e] = first row of the segment (r, e).
// Example, E = 2, R = 2, send_counts = [[0, 1], [2, 1]]: ends = [[0, 1], [2, 3]], first_rows = [[0, 0], [2, 3]].
// Launch: one block of 1024 threads (any power of two will do).
extern "C" __global__ void plan_segments(const int64_t* __restrict__ send_counts,  // [num_experts, num_ranks]  device
                                         uint32_t* __restrict__ tile_counts,       // [num_tiles, num_experts]  device, in place
                                         int64_t* __restrict__ ends,               // [num_experts, num_ranks]  device, written
                                         int64_t* __restrict__ first_rows,         // [num_ranks, num_experts]  device, written
                                         size_t num_tiles, size_t num_experts, size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(int64_t, sums);  // [blockDim.x]
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    uint32_t before = 0;
    for (size_t tile = 0; tile < num_tiles; ++tile) {
      const uint32_t here = tile_counts[tile * num_experts + e];
      tile_counts[tile * num_experts + e] = before;
      before += here;
    }
    int64_t end = 0;
    for (size_t r = 0; r < num_ranks; ++r) ends[e * num_ranks + r] = end += at_least_zero(send_counts[e * num_ranks + r]);
  }
  // An exclusive prefix sum over the segments in row order: each thread sums a run of them, the block scans the
  // sums, each thread writes its run.
  const size_t num_segments = num_experts * num_ranks;
  const size_t run = (num_segments + blockDim.x - 1) / blockDim.x;
  const size_t begin = threadIdx.x * run;
  const size_t end = begin + run < num_segments ? begin + run : num_segments;
  int64_t sum = 0;
  for (size_t i = begin; i < end; ++i) sum += at_least_zero(send_counts[i % num_experts * num_ranks + i / num_experts]);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned step = 1; step < blockDim.x; step *= 2) {
    const int64_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += left;
    __syncthreads();
  }
  int64_t row = sums[threadIdx.x] - sum;
  for (size_t i = begin; i < end; ++i) {
    first_rows[i] = row;
    row += at_least_zero(send_counts[i % num_experts * num_ranks + i / num_experts]);
  }
}

// The row of occurrence j of expert e, or -1 when the counts end before it or the row is past the buffer.
// Example (as above): e = 1, j = 2: the first rank with ends[1, r] > 2 is 1; row = first_rows[1, 1] + 2 - 2 = 3.
__device__ inline int64_t row_of(const int64_t* ends, const int64_t* first_rows, size_t e, int64_t j, size_t num_experts,
                                 size_t num_ranks, size_t num_slots) {
  const int64_t* const ends_R = ends + e * num_ranks;
  size_t low = 0, high = num_ranks;  // the first r with ends_R[r] > j
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (ends_R[middle] > j) high = middle; else low = middle + 1;
  }
  if (low == num_ranks) return -1;
  const int64_t row = first_rows[low * num_experts + e] + j - (low ? ends_R[low - 1] : 0);
  return static_cast<size_t>(row) < num_slots ? row : -1;
}

// Gives each slot its row. Lanes with the same expert take consecutive occurrences, in lane order.
// Launch: as plan_count. row_ids is filled with -1 before.
template <typename Id>
__device__ void place_tile(const Id* __restrict__ ids,               // [num_slots]               device
                           const uint32_t* __restrict__ tile_starts, // [num_tiles, num_experts]  device, of plan_segments
                           const int64_t* __restrict__ ends,         // [num_experts, num_ranks]  device
                           const int64_t* __restrict__ first_rows,   // [num_ranks, num_experts]  device
                           int64_t* __restrict__ row_ids,            // [num_slots]               device, -1
                           int64_t* __restrict__ positions,          // [num_slots]               device, written
                           size_t num_slots, size_t num_experts, size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(unsigned, next_E);  // the next occurrence of each expert
  for (size_t e = threadIdx.x; e < num_experts; e += kWarp) next_E[e] = tile_starts[blockIdx.x * num_experts + e];
  __syncwarp();
  const size_t first = blockIdx.x * kTileSlots;
  for (size_t round = 0; round < kTileSlots && first + round < num_slots; round += kWarp) {
    const size_t s = first + round + threadIdx.x;
    const int64_t id = s < num_slots ? static_cast<int64_t>(ids[s]) : -1;
    const bool routed = id >= 0 && static_cast<size_t>(id) < num_experts;
    const unsigned e = routed ? static_cast<unsigned>(id) : kAllLanes;
    const unsigned equals = __match_any_sync(kAllLanes, e);
    const unsigned before = __popc(equals & ((1u << threadIdx.x) - 1));
    const int64_t j = routed ? static_cast<int64_t>(next_E[e]) + before : 0;
    __syncwarp();
    if (routed && before == 0) next_E[e] += __popc(equals);
    __syncwarp();
    const int64_t row = routed ? row_of(ends, first_rows, e, j, num_experts, num_ranks, num_slots) : -1;
    if (s < num_slots) positions[s] = row;
    if (row >= 0) row_ids[row] = static_cast<int64_t>(s);
  }
}
extern "C" __global__ void plan_place_i32(const int32_t* ids, const uint32_t* tile_starts, const int64_t* ends,
                                          const int64_t* first_rows, int64_t* row_ids, int64_t* positions,
                                          size_t num_slots, size_t num_experts, size_t num_ranks) {
  place_tile(ids, tile_starts, ends, first_rows, row_ids, positions, num_slots, num_experts, num_ranks);
}
extern "C" __global__ void plan_place_i64(const int64_t* ids, const uint32_t* tile_starts, const int64_t* ends,
                                          const int64_t* first_rows, int64_t* row_ids, int64_t* positions,
                                          size_t num_slots, size_t num_experts, size_t num_ranks) {
  place_tile(ids, tile_starts, ends, first_rows, row_ids, positions, num_slots, num_experts, num_ranks);
}

// row_ids[positions[s]] = s; positions out of range are skipped. Launch: 1-D grid of any size. row_ids is filled
// with -1 before. Example: positions = [2, -1, 0], 3 rows: row_ids = [2, -1, 0].
extern "C" __global__ void invert_positions(const int64_t* __restrict__ positions,  // [num_slots]  device
                                            int64_t* __restrict__ row_ids,          // [num_rows]   device, -1
                                            size_t num_slots, size_t num_rows) {
  for (size_t s = global_thread(); s < num_slots; s += num_threads()) {
    const size_t row = static_cast<size_t>(positions[s]);
    if (row < num_rows) row_ids[row] = static_cast<int64_t>(s);
  }
}

// ---- rows ---------------------------------------------------------------------------------------
// out[i] = x[row_ids[i] / top_k], zeros where row_ids[i] is no slot. Launch: blocks take rows in turn; a row is
// `units` Units long, whatever its dtype. Example: x = [a, b], top_k = 2, row_ids = [2, 0, -1]: out = [b, a, 0].
template <typename Unit>
__device__ void permute_rows(const Unit* __restrict__ x,              // [num_tokens, units]  device
                             const int64_t* __restrict__ row_ids,     // [num_rows]           device
                             Unit* __restrict__ out,                  // [num_rows, units]    device, written
                             size_t num_rows, size_t units, size_t num_tokens, size_t top_k) {
  for (size_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const int64_t slot = row_ids[i];
    const size_t token = static_cast<size_t>(slot) / top_k;
    const bool copied = slot >= 0 && token < num_tokens;
    for (size_t u = threadIdx.x; u < units; u += blockDim.x) out[i * units + u] = copied ? x[token * units + u] : Unit{};
  }
}
#define EVERMOE_PERMUTE(name, Unit)                                                                               \
  extern "C" __global__ void name(const Unit* x, const int64_t* row_ids, Unit* out, size_t num_rows, size_t units, \
                                  size_t num_tokens, size_t top_k) {                                              \
    permute_rows<Unit>(x, row_ids, out, num_rows, units, num_tokens, top_k);                                      \
  }
using Bytes16 = Pack<uint32_t, 4>;
EVERMOE_PERMUTE(permute_16, Bytes16)  // rows of whole 16 bytes, aligned
EVERMOE_PERMUTE(permute_2, uint16_t)  // any rows

// out[t] = sum over k of weights[t, k] * rows[positions[t, k]]: float32, in the order of k, one rounding; the
// first term starts the sum. Launch: blocks take tokens in turn. weights may be null: 1.
// Example: rows = [1, 10], positions = [[1, 0]], weights = [[0.5, 2]]: out = [0.5 * 10 + 2 * 1] = [7].
template <typename Row, typename Weight, int kCount>
__device__ void combine_rows(const Row* __restrict__ rows,            // [num_rows, width]    device
                             const int64_t* __restrict__ positions,   // [num_tokens, top_k]  device
                             const Weight* __restrict__ weights,      // [num_tokens, top_k]  device, or null
                             Row* __restrict__ out,                   // [num_tokens, width]  device, written
                             size_t num_tokens, size_t top_k, size_t num_rows, size_t width) {
  using Columns = Pack<Row, kCount>;
  for (size_t t = blockIdx.x; t < num_tokens; t += gridDim.x) {
    for (size_t c = threadIdx.x * static_cast<size_t>(kCount); c < width; c += blockDim.x * static_cast<size_t>(kCount)) {
      float sum[kCount] = {};
      bool started = false;
      for (size_t s = t * top_k; s < (t + 1) * top_k; ++s) {
        const size_t row = static_cast<size_t>(positions[s]);
        if (row >= num_rows) continue;
        const float weight = weights ? to_float(weights[s]) : 1.0f;
        const Columns columns = *reinterpret_cast<const Columns*>(rows + row * width + c);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float term = __fmul_rn(weight, to_float(columns.at[i]));
          sum[i] = started ? __fadd_rn(sum[i], term) : term;
        }
        started = true;
      }
      Columns result;
#pragma unroll
      for (int i = 0; i < kCount; ++i) result.at[i] = from_float<Row>(sum[i]);
      *reinterpret_cast<Columns*>(out + t * width + c) = result;
    }
  }
}
#define EVERMOE_UNPERMUTE(name, Row, Weight, count)                                                              \
  extern "C" __global__ void name(const Row* rows, const int64_t* positions, const Weight* weights, Row* out,     \
                                  size_t num_tokens, size_t top_k, size_t num_rows, size_t width) {               \
    combine_rows<Row, Weight, count>(rows, positions, weights, out, num_tokens, top_k, num_rows, width);          \
  }
// name: row type, weight type, elements at once (more than 1: rows of whole 16 bytes, aligned)
EVERMOE_UNPERMUTE(unpermute_f32_f32_1, float, float, 1)
EVERMOE_UNPERMUTE(unpermute_f32_f32_4, float, float, 4)
EVERMOE_UNPERMUTE(unpermute_bf16_f32_1, Bf16, float, 1)
EVERMOE_UNPERMUTE(unpermute_bf16_f32_8, Bf16, float, 8)
EVERMOE_UNPERMUTE(unpermute_bf16_bf16_1, Bf16, Bf16, 1)
EVERMOE_UNPERMUTE(unpermute_bf16_bf16_8, Bf16, Bf16, 8)
EVERMOE_UNPERMUTE(unpermute_f16_f32_1, Fp16, float, 1)
EVERMOE_UNPERMUTE(unpermute_f16_f32_8, Fp16, float, 8)
EVERMOE_UNPERMUTE(unpermute_f16_f16_1, Fp16, Fp16, 1)
EVERMOE_UNPERMUTE(unpermute_f16_f16_8, Fp16, Fp16, 8)

// For the slot s of row i: grad_rows[i] = weights[s] * grad[s / top_k], grad_weights[s] = grad[s / top_k] . rows[i];
// zeros where the row has no slot. Lane l adds the columns c with c % 32 == l, then the lanes are added as a tree.
// Launch: blocks of whole warps; warps take rows in turn. grad_weights is zeroed before.
// Example: grad = [3], rows = [1, 10], row_ids = [1, 0], weights = [[0.5, 2]], top_k = 2: grad_rows = [6, 1.5],
// grad_weights = [[30, 3]].
template <typename Row, typename Weight>
__device__ void combine_backward(const Row* __restrict__ grad,            // [num_tokens, width]  device
                                 const Row* __restrict__ rows,            // [num_rows, width]    device
                                 const int64_t* __restrict__ row_ids,     // [num_rows]           device
                                 const Weight* __restrict__ weights,      // [num_slots]          device
                                 Row* __restrict__ grad_rows,             // [num_rows, width]    device, written
                                 Weight* __restrict__ grad_weights,       // [num_slots]          device, zeroed
                                 size_t num_rows, size_t width, size_t num_slots, size_t top_k) {
  const size_t lane = threadIdx.x % kWarp;
  for (size_t i = global_thread() / kWarp; i < num_rows; i += num_threads() / kWarp) {
    const size_t slot = static_cast<size_t>(row_ids[i]);
    if (slot >= num_slots) {
      for (size_t c = lane; c < width; c += kWarp) grad_rows[i * width + c] = from_float<Row>(0.0f);
      continue;
    }
    const float weight = to_float(weights[slot]);
    const Row* const grad_H = grad + slot / top_k * width;
    float dot = 0.0f;
    for (size_t c = lane; c < width; c += kWarp) {
      const float here = to_float(grad_H[c]);
      dot = __fadd_rn(dot, __fmul_rn(here, to_float(rows[i * width + c])));
      grad_rows[i * width + c] = from_float<Row>(__fmul_rn(weight, here));
    }
    for (unsigned half = kWarp / 2; half > 0; half /= 2) dot = __fadd_rn(dot, __shfl_down_sync(kAllLanes, dot, half));
    if (lane == 0) grad_weights[slot] = from_float<Weight>(dot);
  }
}
#define EVERMOE_BACKWARD(name, Row, Weight)                                                                         \
  extern "C" __global__ void name(const Row* grad, const Row* rows, const int64_t* row_ids, const Weight* weights,   \
                                  Row* grad_rows, Weight* grad_weights, size_t num_rows, size_t width,              \
                                  size_t num_slots, size_t top_k) {                                                 \
    combine_backward<Row, Weight>(grad, rows, row_ids, weights, grad_rows, grad_weights, num_rows, width, num_slots, top_k); \
  }
EVERMOE_BACKWARD(unpermute_backward_f32_f32, float, float)
EVERMOE_BACKWARD(unpermute_backward_bf16_f32, Bf16, float)
EVERMOE_BACKWARD(unpermute_backward_bf16_bf16, Bf16, Bf16)
EVERMOE_BACKWARD(unpermute_backward_f16_f32, Fp16, float)
EVERMOE_BACKWARD(unpermute_backward_f16_f16, Fp16, Fp16)
