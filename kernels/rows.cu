// rows.cu -- tokens to the rows of a plan, and the weighted sum of rows back, with its gradient.
//
// A slot s = t * K + k is one choice of a token. -1 means no slot in row_ids and no row in positions; any other value out of
// range is treated as -1. Caller owns all memory.
#include "common.cuh"

// Writes row_ids[positions[s]] = s; positions out of range are skipped. Launch: 1-D grid of any size. row_ids must be
// filled with -1 before. Example: positions = [2, -1, 0], 3 rows: row_ids = [2, -1, 0].
extern "C" __global__ void invert_positions(const void* __restrict__ positions,  // [num_slots]  device
                                            void* __restrict__ row_ids,          // [num_rows]   device, -1
                                            size_t wide, size_t num_slots, size_t num_rows) {
  for (size_t s = global_thread(); s < num_slots; s += num_threads()) {
    const size_t row = static_cast<size_t>(index_at(positions, s, wide));
    if (row < num_rows) set_index(row_ids, row, wide, static_cast<int64_t>(s));
  }
}

// A slot and a row belong together if each names the other: then the row is written by its token, which is read once
// for all its rows. Any other row is filled by row_ids. The lanes of a warp each look up a slot or a row, and share
// their results. Example: K = 2, row_ids = [2, 0, -1], positions = [[1, -1], [0, 5]]: token 0 writes row 1, token 1 row
// 0, and row 2 is zeroed.
template <typename Unit>
__device__ inline void permute_by(const Unit* __restrict__ x, const void* __restrict__ row_ids,
                                  const void* __restrict__ positions, Unit* __restrict__ out, size_t wide_ids,
                                  size_t wide_positions, size_t num_rows, size_t units, size_t num_tokens, size_t top_k) {
  const size_t num_slots = num_tokens * top_k;
  const unsigned lane = threadIdx.x % kWarp;
  const RowGroup group = row_group((units + kInFlight - 1) / kInFlight, kWarp);
  for (size_t t = group.index; t < num_tokens; t += group.count) {
    for (size_t k = 0; k < top_k; k += kWarp) {
      const size_t s = t * top_k + k + lane;
      size_t my_row = k + lane < top_k ? static_cast<size_t>(index_at(positions, s, wide_positions)) : num_rows;
      const bool is_mine = my_row < num_rows && static_cast<size_t>(index_at(row_ids, my_row, wide_ids)) == s;
      const unsigned all = __ballot_sync(kAllLanes, is_mine);
      for (size_t first = group.thread; first - group.thread < units && all; first += group.threads * kInFlight) {
        Unit values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const size_t u = first + i * group.threads;
          values[i] = u < units ? x[t * units + u] : Unit{};
        }
        for (unsigned left = all; left; left &= left - 1) {
          const size_t row = __shfl_sync(kAllLanes, my_row, __ffs(left) - 1);
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            const size_t u = first + i * group.threads;
            if (u < units) out[row * units + u] = values[i];
          }
        }
      }
    }
  }
  const size_t warps = num_threads() / kWarp, share = quotient_of(num_rows + warps - 1, warps);
  const size_t at_once = share < kWarp ? share : kWarp;  // rows that a warp looks up
  for (size_t first = global_thread() / kWarp * at_once; first < num_rows; first += warps * at_once) {
    const bool is_row = lane < at_once && first + lane < num_rows;
    const size_t slot = is_row ? static_cast<size_t>(index_at(row_ids, first + lane, wide_ids)) : num_slots;
    const bool is_held = slot < num_slots;
    const bool is_done = is_held && static_cast<size_t>(index_at(positions, slot, wide_positions)) == first + lane;
    const size_t my_token = is_held ? quotient_of(slot, top_k) : num_tokens;
    for (unsigned left = __ballot_sync(kAllLanes, is_row && !is_done); left; left &= left - 1) {
      const int at = __ffs(left) - 1;
      const size_t token = __shfl_sync(kAllLanes, my_token, at);
      for (size_t u = lane; u < units; u += kWarp)
        out[(first + at) * units + u] = token < num_tokens ? x[token * units + u] : Unit{};
    }
  }
}
// Writes out[i] = x[row_ids[i] / top_k], zeros if row_ids[i] is no slot; row_bytes is even. Launch: 1-D grid of any
// size, blocks of a power of two. Example: x = [a, b], top_k = 2, row_ids = [2, 0, -1]: out = [b, a, 0].
extern "C" __global__ __launch_bounds__(256, 4) void permute(
    const void* x,          // [num_tokens, row_bytes]  device
    const void* row_ids,    // [num_rows]               device
    const void* positions,  // [num_tokens, top_k]      device
    void* out,              // [num_rows, row_bytes]    device, written
    size_t wide_ids, size_t wide_positions, size_t num_rows, size_t row_bytes, size_t num_tokens, size_t top_k) {
  const auto by = [&](auto unit) {
    using Unit = decltype(unit);
    permute_by(static_cast<const Unit*>(x), row_ids, positions, static_cast<Unit*>(out), wide_ids, wide_positions, num_rows,
               row_bytes / sizeof(Unit), num_tokens, top_k);
  };
  if (multiples_of(16, x, out, nullptr, row_bytes)) by(Pack<uint32_t, 4>{});
  else if (multiples_of(8, x, out, nullptr, row_bytes)) by(Pack<uint32_t, 2>{});
  else if (multiples_of(4, x, out, nullptr, row_bytes)) by(uint32_t{});
  else by(uint16_t{});
}

// Processes kCount columns at once. A group of warps takes several tokens in turn, with kAtOnce slots together: their
// rows are loaded together, then added in the order of the slots. Lane j of a warp looks up slot j of the tokens, and
// shares the address of its row. Loads have no conditions, so that none waits for another: those of a slot without a
// row read the first row and discard it. A sum starts with -0.0, which changes no term.
template <int kCount, typename Row, typename Weight>
__device__ void combine_columns(const Row* __restrict__ rows, const void* __restrict__ positions,
                                const Weight* __restrict__ weights, Row* __restrict__ out, size_t wide, size_t num_tokens,
                                size_t top_k, size_t num_rows, size_t width) {
  using Columns = Pack<Row, kCount>;
  constexpr int kAtOnce = 4;
  const unsigned units = static_cast<unsigned>(width / kCount), lane = threadIdx.x % kWarp;
  const RowGroup group = row_group(units, kWarp, kCombiningThreads);
  const unsigned thread = static_cast<unsigned>(group.thread), threads = static_cast<unsigned>(group.threads);
  const size_t tokens = top_k < kAtOnce ? (kAtOnce + top_k - 1) / top_k : 1;
  for (size_t t = group.index * tokens; t < num_tokens; t += group.count * tokens) {
    const size_t begin = t * top_k;
    const unsigned slots = static_cast<unsigned>((t + tokens < num_tokens ? tokens : num_tokens - t) * top_k);
    size_t my_row = 0;  // its first element
    float my_weight = 1.0f;
    unsigned held = 0;  // lanes whose slot has a row
    for (unsigned u = thread; u - thread < units; u += threads) {
      const Row* const from = rows + size_t{u < units ? u : units - 1} * kCount;
      Columns* to = reinterpret_cast<Columns*>(out + t * width) + u;
      float sum[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = -0.0f;
      bool started = false;
      unsigned k = 0;
      for (unsigned s = 0; s < slots; s += kAtOnce) {
        if (s % kWarp == 0 && (u == thread || slots > kWarp)) {
          const size_t row = s + lane < slots ? static_cast<size_t>(index_at(positions, begin + s + lane, wide)) : num_rows;
          my_row = row < num_rows ? row * width : 0;
          if (row < num_rows && weights) my_weight = to_float(weights[begin + s + lane]);
          held = __ballot_sync(kAllLanes, row < num_rows);
        }
        Loaded<Row, kCount> columns[kAtOnce];
        float weight[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const size_t row = __shfl_sync(kAllLanes, my_row, (s + j) % kWarp);
          columns[j] = *reinterpret_cast<const Loaded<Row, kCount>*>(from + row);
          weight[j] = __shfl_sync(kAllLanes, my_weight, (s + j) % kWarp);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (s + j >= slots) break;
          if (held >> (s + j) % kWarp & 1) {
            started = true;
#pragma unroll
            for (int i = 0; i < kCount; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[j], columns[j].at(i)));
          }
          if (++k < top_k) continue;
          Columns result;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            result.at[i] = from_float<Row>(started ? sum[i] : 0.0f);
            sum[i] = -0.0f;
          }
          if (u < units) *to = result;
          to += units;
          started = false;
          k = 0;
        }
      }
    }
  }
}
// Writes out[t] = sum over k of weights[t, k] * rows[positions[t, k]]: float32, in the order of k, one rounding; the
// first term starts the sum. top_k and num_rows are above 0; null weights mean 1. Launch: 1-D grid of any size, blocks
// of a power of two. Example: rows = [1, 10], positions = [[1, 0]], weights = [[0.5, 2]]: out = [0.5 * 10 + 2 * 1] =
// [7].
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
  extern "C" __global__ __launch_bounds__(256, 3) void name(const Row* rows, const void* positions, const Weight* weights, \
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
    Loaded<Row, kCount> grad[kPacks], row[kPacks];
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const size_t at = c + pack * kCount;
      grad[pack] = row[pack] = {};
      if (at >= width) continue;
      grad[pack] = *reinterpret_cast<const Loaded<Row, kCount>*>(grad_H + at);
      row[pack] = *reinterpret_cast<const Loaded<Row, kCount>*>(row_H + at);
    }
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      Columns scaled;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float here = grad[pack].at(i);
        float& partial = partials[pack * kCount + i];
        partial = __fadd_rn(partial, __fmul_rn(here, row[pack].at(i)));
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
// zeros for a row without a slot, or a slot without a row. Launch: blocks of full warps. Warps take slots in turn, so
// that those of a token, which all read its gradient, run concurrently.
// Example: grad = [3], rows = [1, 10], positions = [[1, 0]], row_ids = [1, 0], weights = [[0.5, 2]], top_k = 2:
// grad_rows = [6, 1.5], grad_weights = [[30, 3]].
template <typename Id, typename Row, typename Weight>
__device__ void combine_backward(const Row* __restrict__ grad,        // [num_tokens, width]  device
                                 const Row* __restrict__ rows,        // [num_rows, width]    device
                                 const Id* __restrict__ positions,    // [num_slots]          device
                                 const Id* __restrict__ row_ids,      // [num_rows]           device, its inverse
                                 const Weight* __restrict__ weights,  // [num_slots]          device
                                 Row* __restrict__ grad_rows,         // [num_rows, width]    device, written
                                 Weight* __restrict__ grad_weights,   // [num_slots]          device, written
                                 size_t num_rows, size_t width, size_t num_slots, size_t top_k) {
  const bool is_wide = multiples_of(16, grad, rows, grad_rows, width * sizeof(Row));
  const size_t lane = threadIdx.x % kWarp, warp = global_thread() / kWarp, warps = num_threads() / kWarp;
  for (size_t s = warp; s < num_slots; s += warps) {
    const size_t row = static_cast<size_t>(static_cast<int64_t>(positions[s]));
    float dot = 0.0f;
    if (row < num_rows && static_cast<size_t>(static_cast<int64_t>(row_ids[row])) == s) {
      const float weight = to_float(weights[s]);
      const Row* const grad_H = grad + quotient_of(s, top_k) * width;
      const Row* const row_H = rows + row * width;
      Row* const grad_row_H = grad_rows + row * width;
      dot = is_wide ? backward_row<16 / sizeof(Row)>(grad_H, row_H, grad_row_H, weight, width)
                  : backward_row<1>(grad_H, row_H, grad_row_H, weight, width);
    }
    if (lane == 0) grad_weights[s] = from_float<Weight>(dot);
  }
  for (size_t i = warp; i < num_rows; i += warps) {
    if (static_cast<size_t>(static_cast<int64_t>(row_ids[i])) < num_slots) continue;
    for (size_t c = lane; c < width; c += kWarp) grad_rows[i * width + c] = from_float<Row>(0.0f);
  }
}
#define EVERMOE_BACKWARD(name, Id, Row, Weight)                                                                       \
  extern "C" __global__ void name(const Row* grad, const Row* rows, const Id* positions, const Id* row_ids,           \
                                  const Weight* weights, Row* grad_rows, Weight* grad_weights, size_t num_rows,       \
                                  size_t width, size_t num_slots, size_t top_k) {                                     \
    combine_backward(grad, rows, positions, row_ids, weights, grad_rows, grad_weights, num_rows, width, num_slots,    \
                     top_k);                                                                                          \
  }
#define EVERMOE_BACKWARDS(name, Row, Weight)          \
  EVERMOE_BACKWARD(name##_i32, int32_t, Row, Weight) \
  EVERMOE_BACKWARD(name##_i64, int64_t, Row, Weight)
EVERMOE_BACKWARDS(unpermute_backward_f32_f32, float, float)
EVERMOE_BACKWARDS(unpermute_backward_bf16_f32, Bf16, float)
EVERMOE_BACKWARDS(unpermute_backward_bf16_bf16, Bf16, Bf16)
EVERMOE_BACKWARDS(unpermute_backward_f16_f32, Fp16, float)
EVERMOE_BACKWARDS(unpermute_backward_f16_f16, Fp16, Fp16)
