// dispatch.cu -- the plan of a dispatch (a stable counting sort), the copies of rows, and the weighted sum back.
//
// A slot s = t * K + k is one choice of a token. Rows are ordered by (destination rank, expert, slot). -1 means:
// no expert in ids, no slot in row_ids, no row in positions; any other value out of range is treated as -1.
// The plan: plan_count -> plan_starts -> plan_segments -> plan_place, on one stream. Caller owns all memory.
#include "common.cuh"

// Row ids and positions are int32, or int64 where `wide` is not 0: all threads take the same side of the branch, and one
// kernel serves both.
__device__ inline int64_t index_at(const void* indices, size_t i, size_t wide) {
  return wide ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}
__device__ inline void set_index(void* indices, size_t i, size_t wide, int64_t value) {
  if (wide) static_cast<int64_t*>(indices)[i] = value; else static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(value);
}

// ---- plan ---------------------------------------------------------------------------------------
// A tile of consecutive slots is one warp's, so that the order within it is the order of the lanes. With many experts it
// is longer, by kTileSlotsPerExpert.
// Example: 512 for up to 256 experts, 8192 for 4096.
__device__ inline size_t tile_slots(size_t num_experts) {
  size_t slots = kLeastTileSlots;
  while (slots < kTileSlotsPerExpert * num_experts) slots *= 2;
  return slots;
}

// tile_counts[tile, e] = slots of expert e in the tile. Launch: one block of 32 threads per tile, dynamic shared
// memory for num_experts uint32_t. Example, tile of 4, E = 2, ids = [1, 0, 1, 1, 0]: [[1, 3], [1, 0]].
template <typename Id>
__device__ void count_tile(const Id* __restrict__ ids,            // [num_slots]               device
                           uint32_t* __restrict__ tile_counts,    // [num_tiles, num_experts]  device, written
                           size_t num_slots, size_t num_experts) {
  EVERMOE_DYNAMIC_SHARED(unsigned, counts_E);
  for (size_t e = threadIdx.x; e < num_experts; e += kWarp) counts_E[e] = 0;
  __syncwarp();
  const size_t tile = tile_slots(num_experts), first = blockIdx.x * tile;
  for (size_t s = first + threadIdx.x; s < first + tile && s < num_slots; s += kWarp) {
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

// tile_counts[tile, e] becomes the number of e's slots in earlier tiles. Example, E = 1: [[2], [3], [1]] -> [[0], [2], [5]].
// Launch: a block of whole warps for each 32 experts, dynamic shared memory for blockDim.x uint32_t. A lane has an
// expert, a warp has a run of the tiles.
extern "C" __global__ void plan_starts(uint32_t* __restrict__ tile_counts,  // [num_tiles, num_experts]  device, in place
                                       size_t num_tiles, size_t num_experts) {
  EVERMOE_DYNAMIC_SHARED(uint32_t, run_sums);  // [warps, kWarp]
  const size_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const size_t e = blockIdx.x * static_cast<size_t>(kWarp) + lane;
  const size_t run = (num_tiles + warps - 1) / warps, begin = warp * run;
  const size_t end = e >= num_experts ? begin : begin + run < num_tiles ? begin + run : num_tiles;
  uint32_t sum = 0;
  for (size_t tile = begin; tile < end; ++tile) sum += tile_counts[tile * num_experts + e];
  run_sums[threadIdx.x] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (size_t earlier = 0; earlier < warp; ++earlier) before += run_sums[earlier * kWarp + lane];
  for (size_t tile = begin; tile < end; ++tile) {
    const uint32_t here = tile_counts[tile * num_experts + e];
    tile_counts[tile * num_experts + e] = before;
    before += here;
  }
}

// ends[e, r] = slots of e that go to ranks 0..=r; first_rows[r, e] = first row of the segment (r, e).
// Example, E = 2, R = 2, send_counts = [[0, 1], [2, 1]]: ends = [[0, 1], [2, 3]], first_rows = [[0, 0], [2, 3]].
// Launch: one block of 1024 threads (any power of two will do), dynamic shared memory for as many int64_t.
extern "C" __global__ void plan_segments(const int64_t* __restrict__ send_counts,  // [num_experts, num_ranks]  device
                                         int64_t* __restrict__ ends,               // [num_experts, num_ranks]  device, written
                                         int64_t* __restrict__ first_rows,         // [num_ranks, num_experts]  device, written
                                         size_t num_experts, size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(int64_t, sums);  // [blockDim.x]
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int64_t end = 0;
    for (size_t r = 0; r < num_ranks; ++r) ends[e * num_ranks + r] = end += at_least_zero(send_counts[e * num_ranks + r]);
  }
  scan_counts(send_counts, first_rows, sums, num_experts * num_ranks, num_experts, num_ranks);
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
                           const uint32_t* __restrict__ tile_starts, // [num_tiles, num_experts]  device, of plan_starts
                           const int64_t* __restrict__ ends,         // [num_experts, num_ranks]  device
                           const int64_t* __restrict__ first_rows,   // [num_ranks, num_experts]  device
                           void* __restrict__ row_ids,               // [num_slots]               device, -1
                           void* __restrict__ positions,             // [num_slots]               device, written
                           size_t wide, size_t num_slots, size_t num_experts, size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(unsigned, next_E);  // the next occurrence of each expert
  for (size_t e = threadIdx.x; e < num_experts; e += kWarp) next_E[e] = tile_starts[blockIdx.x * num_experts + e];
  __syncwarp();
  const size_t tile = tile_slots(num_experts), first = blockIdx.x * tile;
  for (size_t round = 0; round < tile && first + round < num_slots; round += kWarp) {
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
    if (s < num_slots) set_index(positions, s, wide, row);
    if (row >= 0) set_index(row_ids, static_cast<size_t>(row), wide, static_cast<int64_t>(s));
  }
}
extern "C" __global__ void plan_place_i32(const int32_t* ids, const uint32_t* tile_starts, const int64_t* ends,
                                          const int64_t* first_rows, void* row_ids, void* positions, size_t wide,
                                          size_t num_slots, size_t num_experts, size_t num_ranks) {
  place_tile(ids, tile_starts, ends, first_rows, row_ids, positions, wide, num_slots, num_experts, num_ranks);
}
extern "C" __global__ void plan_place_i64(const int64_t* ids, const uint32_t* tile_starts, const int64_t* ends,
                                          const int64_t* first_rows, void* row_ids, void* positions, size_t wide,
                                          size_t num_slots, size_t num_experts, size_t num_ranks) {
  place_tile(ids, tile_starts, ends, first_rows, row_ids, positions, wide, num_slots, num_experts, num_ranks);
}

// row_ids[positions[s]] = s; positions out of range are skipped. Launch: 1-D grid of any size. row_ids is filled
// with -1 before. Example: positions = [2, -1, 0], 3 rows: row_ids = [2, -1, 0].
extern "C" __global__ void invert_positions(const void* __restrict__ positions,  // [num_slots]  device
                                            void* __restrict__ row_ids,          // [num_rows]   device, -1
                                            size_t wide, size_t num_slots, size_t num_rows) {
  for (size_t s = global_thread(); s < num_slots; s += num_threads()) {
    const size_t row = static_cast<size_t>(index_at(positions, s, wide));
    if (row < num_rows) set_index(row_ids, row, wide, static_cast<int64_t>(s));
  }
}

// ---- rows ---------------------------------------------------------------------------------------
// slot / top_k; a 64-bit division takes several times as long as a 32-bit one.
__device__ inline size_t token_of(size_t slot, size_t top_k) {
  if (((slot | top_k) >> 32) == 0) return static_cast<uint32_t>(slot) / static_cast<uint32_t>(top_k);
  return slot / top_k;
}

// out[i] = x[row_ids[i] / top_k], zeros where row_ids[i] is no slot; row_bytes is even. Launch: 1-D grid of any size,
// blocks of a power of two. Example: x = [a, b], top_k = 2, row_ids = [2, 0, -1]: out = [b, a, 0].
extern "C" __global__ void permute(const void* x,        // [num_tokens, row_bytes]  device
                                   const void* row_ids,  // [num_rows]               device
                                   void* out,            // [num_rows, row_bytes]    device, written
                                   size_t wide, size_t num_rows, size_t row_bytes, size_t num_tokens, size_t top_k) {
  copy_rows(x, out, num_rows, row_bytes, num_tokens, [=](size_t i) {
    const int64_t slot = index_at(row_ids, i, wide);
    return slot < 0 ? num_tokens : token_of(static_cast<size_t>(slot), top_k);
  });
}

// kCount columns at once. A group takes so many tokens in turn that there are kInFlight slots: their rows are loaded
// together, then added in the order of the slots.
template <int kCount, typename Row, typename Weight>
__device__ void combine_columns(const Row* __restrict__ rows, const void* __restrict__ positions,
                                const Weight* __restrict__ weights, Row* __restrict__ out, size_t wide, size_t num_tokens,
                                size_t top_k, size_t num_rows, size_t width) {
  using Columns = Pack<Row, kCount>;
  const size_t units = width / kCount;
  const RowGroup group = row_group(units);
  const size_t tokens = top_k < kInFlight ? (kInFlight + top_k - 1) / top_k : 1;
  for (size_t t = group.index * tokens; t < num_tokens; t += group.count * tokens) {
    const size_t end = (t + tokens < num_tokens ? t + tokens : num_tokens) * top_k;
    for (size_t u = group.thread; u < units; u += group.threads) {
      Columns* to = reinterpret_cast<Columns*>(out + t * width) + u;
      float sum[kCount] = {};
      bool started = false;
      size_t k = 0;
      for (size_t s = t * top_k; s < end; s += kInFlight) {
        Columns columns[kInFlight];
        float weight[kInFlight];
        bool held[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          const size_t row = s + j < end ? static_cast<size_t>(index_at(positions, s + j, wide)) : num_rows;
          held[j] = row < num_rows;
          columns[j] = held[j] ? reinterpret_cast<const Columns*>(rows + row * width)[u] : Columns{};
          weight[j] = held[j] && weights ? to_float(weights[s + j]) : 1.0f;
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (s + j >= end) break;
#pragma unroll
          for (int i = 0; i < kCount && held[j]; ++i) {
            const float term = __fmul_rn(weight[j], to_float(columns[j].at[i]));
            sum[i] = started ? __fadd_rn(sum[i], term) : term;
          }
          started = started || held[j];
          if (++k < top_k) continue;
          Columns result;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            result.at[i] = from_float<Row>(sum[i]);
            sum[i] = 0.0f;
          }
          *to = result;
          to += units;
          started = false;
          k = 0;
        }
      }
    }
  }
}
// out[t] = sum over k of weights[t, k] * rows[positions[t, k]]: float32, in the order of k, one rounding; the
// first term starts the sum. top_k is above 0; weights may be null: 1. Launch: 1-D grid of any size, blocks of a power of
// two. Example: rows = [1, 10], positions = [[1, 0]], weights = [[0.5, 2]]: out = [0.5 * 10 + 2 * 1] = [7].
template <typename Row, typename Weight>
__device__ void combine_rows(const Row* rows,        // [num_rows, width]    device
                             const void* positions,  // [num_tokens, top_k]  device
                             const Weight* weights,  // [num_tokens, top_k]  device, or null
                             Row* out,               // [num_tokens, width]  device, written
                             size_t wide, size_t num_tokens, size_t top_k, size_t num_rows, size_t width) {
  const size_t row_bytes = width * sizeof(Row);
  if (multiples_of(16, rows, out, nullptr, row_bytes)) {
    combine_columns<16 / sizeof(Row)>(rows, positions, weights, out, wide, num_tokens, top_k, num_rows, width);
  } else if (multiples_of(8, rows, out, nullptr, row_bytes)) {
    combine_columns<8 / sizeof(Row)>(rows, positions, weights, out, wide, num_tokens, top_k, num_rows, width);
  } else if (sizeof(Row) < 4 && multiples_of(4, rows, out, nullptr, row_bytes)) {
    combine_columns<4 / sizeof(Row)>(rows, positions, weights, out, wide, num_tokens, top_k, num_rows, width);
  } else {
    combine_columns<1>(rows, positions, weights, out, wide, num_tokens, top_k, num_rows, width);
  }
}
#define EVERMOE_UNPERMUTE(name, Row, Weight)                                                                        \
  extern "C" __global__ __launch_bounds__(256, 2) void name(const Row* rows, const void* positions, const Weight* weights, \
                                                         Row* out, size_t wide, size_t num_tokens, size_t top_k,     \
                                                         size_t num_rows, size_t width) {                            \
    combine_rows<Row, Weight>(rows, positions, weights, out, wide, num_tokens, top_k, num_rows, width);              \
  }
EVERMOE_UNPERMUTE(unpermute_f32_f32, float, float)
EVERMOE_UNPERMUTE(unpermute_bf16_f32, Bf16, float)
EVERMOE_UNPERMUTE(unpermute_bf16_bf16, Bf16, Bf16)
EVERMOE_UNPERMUTE(unpermute_f16_f32, Fp16, float)
EVERMOE_UNPERMUTE(unpermute_f16_f16, Fp16, Fp16)

// Writes weight * grad and returns grad . row, in a fixed order: column c is added to partial c % 256; lane l has the
// partials 8 * l to 8 * l + 7, adds them as a tree (p with p + 4, then 2, 1), then the lanes are added as a tree (l with
// l + 16, then 8, 4, 2, 1). The sum is lane 0's. kCount columns are read and written at once: 1, or 16 bytes.
constexpr int kLaneColumns = 8;
template <int kCount, typename Row>
__device__ float backward_row(const Row* __restrict__ grad_H, const Row* __restrict__ row_H, Row* __restrict__ grad_row_H,
                              float weight, size_t width) {
  using Columns = Pack<Row, kCount>;
  constexpr int kPacks = kLaneColumns / kCount;
  float partials[kLaneColumns] = {};
#pragma unroll 2
  for (size_t c = threadIdx.x % kWarp * kLaneColumns; c < width; c += kWarp * kLaneColumns) {
    Columns grad[kPacks], row[kPacks];
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const size_t at = c + pack * kCount;
      grad[pack] = at < width ? *reinterpret_cast<const Columns*>(grad_H + at) : Columns{};
      row[pack] = at < width ? *reinterpret_cast<const Columns*>(row_H + at) : Columns{};
    }
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      Columns scaled;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float here = to_float(grad[pack].at[i]);
        float& partial = partials[pack * kCount + i];
        partial = __fadd_rn(partial, __fmul_rn(here, to_float(row[pack].at[i])));
        scaled.at[i] = from_float<Row>(__fmul_rn(weight, here));
      }
      if (c + pack * kCount < width) *reinterpret_cast<Columns*>(grad_row_H + c + pack * kCount) = scaled;
    }
  }
#pragma unroll
  for (int half = kLaneColumns / 2; half > 0; half /= 2) {
#pragma unroll
    for (int p = 0; p < half; ++p) partials[p] = __fadd_rn(partials[p], partials[p + half]);
  }
  float dot = partials[0];
  for (unsigned half = kWarp / 2; half > 0; half /= 2) dot = __fadd_rn(dot, __shfl_down_sync(kAllLanes, dot, half));
  return dot;
}

// For the slot s of row i: grad_rows[i] = weights[s] * grad[s / top_k], grad_weights[s] = grad[s / top_k] . rows[i];
// zeros where the row has no slot. Launch: blocks of whole warps; warps take rows in turn. grad_weights is zeroed before.
// Example: grad = [3], rows = [1, 10], row_ids = [1, 0], weights = [[0.5, 2]], top_k = 2: grad_rows = [6, 1.5],
// grad_weights = [[30, 3]].
template <typename Id, typename Row, typename Weight>
__device__ void combine_backward(const Row* __restrict__ grad,            // [num_tokens, width]  device
                                 const Row* __restrict__ rows,            // [num_rows, width]    device
                                 const Id* __restrict__ row_ids,          // [num_rows]           device
                                 const Weight* __restrict__ weights,      // [num_slots]          device
                                 Row* __restrict__ grad_rows,             // [num_rows, width]    device, written
                                 Weight* __restrict__ grad_weights,       // [num_slots]          device, zeroed
                                 size_t num_rows, size_t width, size_t num_slots, size_t top_k) {
  const bool whole = multiples_of(16, grad, rows, grad_rows, width * sizeof(Row));
  const size_t lane = threadIdx.x % kWarp;
  for (size_t i = global_thread() / kWarp; i < num_rows; i += num_threads() / kWarp) {
    const size_t slot = static_cast<size_t>(static_cast<int64_t>(row_ids[i]));
    Row* const grad_row_H = grad_rows + i * width;
    if (slot >= num_slots) {
      for (size_t c = lane; c < width; c += kWarp) grad_row_H[c] = from_float<Row>(0.0f);
      continue;
    }
    const float weight = to_float(weights[slot]);
    const Row* const grad_H = grad + token_of(slot, top_k) * width;
    const Row* const row_H = rows + i * width;
    const float dot = whole ? backward_row<16 / sizeof(Row)>(grad_H, row_H, grad_row_H, weight, width)
                            : backward_row<1>(grad_H, row_H, grad_row_H, weight, width);
    if (lane == 0) grad_weights[slot] = from_float<Weight>(dot);
  }
}
#define EVERMOE_BACKWARD(name, Id, Row, Weight)                                                                       \
  extern "C" __global__ void name(const Row* grad, const Row* rows, const Id* row_ids, const Weight* weights,         \
                                  Row* grad_rows, Weight* grad_weights, size_t num_rows, size_t width,                \
                                  size_t num_slots, size_t top_k) {                                                   \
    combine_backward(grad, rows, row_ids, weights, grad_rows, grad_weights, num_rows, width, num_slots, top_k);       \
  }
#define EVERMOE_BACKWARDS(name, Row, Weight)          \
  EVERMOE_BACKWARD(name##_i32, int32_t, Row, Weight) \
  EVERMOE_BACKWARD(name##_i64, int64_t, Row, Weight)
EVERMOE_BACKWARDS(unpermute_backward_f32_f32, float, float)
EVERMOE_BACKWARDS(unpermute_backward_bf16_f32, Bf16, float)
EVERMOE_BACKWARDS(unpermute_backward_bf16_bf16, Bf16, Bf16)
EVERMOE_BACKWARDS(unpermute_backward_f16_f32, Fp16, float)
EVERMOE_BACKWARDS(unpermute_backward_f16_f16, Fp16, Fp16)
