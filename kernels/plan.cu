// plan.cu -- the plan of a dispatch: a stable counting sort of the slots by (destination rank, expert).
//
// A slot s = t * K + k is one choice of a token. -1 means: no expert in ids, no slot in row_ids, no row in positions; any
// other id out of range is treated as -1. plan_count -> plan_place, on one stream. Caller owns all memory.
#include "common.cuh"

// Blocks of plan_place that fit on an SM at once by registers: nvcc needs a few more for sm_100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kPlacingBlocks = 1;
#else
constexpr int kPlacingBlocks = 2;
#endif

// Two launches, so that no block waits for another: the second reads what other blocks have written in the first. Each
// block has a tile of consecutive slots; each thread has kIdsAtOnce ids in flight. Among the slots of an expert, those
// of a tile follow those of earlier tiles, whose counts the second launch adds up.
constexpr int kIdsAtOnce = 8;
constexpr unsigned kNoExpert = kAllLanes;

template <typename Id> __device__ inline unsigned expert_of(Id id, size_t num_experts) {
  return id >= 0 && static_cast<size_t>(id) < num_experts ? static_cast<unsigned>(id) : kNoExpert;
}
__device__ inline uint64_t least(uint64_t one, uint64_t other) { return one < other ? one : other; }

// Writes starts[i] = counts before i, starts[num] = all of them; each at most `most`, and negative counts are zeros. By
// one warp; a lane takes kIdsAtOnce counts at a time. Example: counts 2, -7, 5, most = 6: starts = [0, 2, 2, 6].
template <typename CountAt>
__device__ inline void scan_by_warp(uint32_t* starts, size_t num, uint64_t most, CountAt count_at) {
  const unsigned lane = threadIdx.x % kWarp;
  uint64_t before = 0; // in this round
  for (size_t round = 0; round < num; round += kWarp * kIdsAtOnce) {
    const size_t first = round + lane * kIdsAtOnce;
    uint64_t counts[kIdsAtOnce], sum = 0;
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i)
      counts[i] = first + i < num ? least(static_cast<uint64_t>(at_least_zero(count_at(first + i))), most) : 0;
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) sum += counts[i];
    for (unsigned step = 1; step < kWarp; step *= 2) {
      const uint64_t left = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += left;
    }
    const uint64_t left = __shfl_up_sync(kAllLanes, sum, 1);
    uint64_t start = before + (lane ? left : 0);
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      if (first + i < num) starts[first + i] = static_cast<uint32_t>(least(start, most));
      start += counts[i];
    }
    before = least(before + __shfl_sync(kAllLanes, sum, kWarp - 1), most);
  }
  if (lane == 0) starts[num] = static_cast<uint32_t>(before);
}

// There are three kinds of blocks. Tile blocks write tile_counts[tile, e] = slots of e in the tile, and fill row_ids
// with -1. After them, one warp per line of send_counts writes begins[e, r] = slots of e that go to ranks before r,
// then first_rows[r, e] = rows of rank r for experts before e; one more column has the sum of all. Sums stop at
// num_slots, the size of the buffer.
// Launch: num_tiles blocks and enough for num_experts + num_ranks warps, dynamic shared memory for num_experts uint32_t.
// Example, tile = 4, E = 2, R = 2, ids = [1, 0, 1, 1, 0], send_counts = [[0, 2], [2, 1]]: tile_counts = [[1, 3], [1, 0]],
// begins = [[0, 0, 2], [0, 2, 3]], first_rows = [[0, 0, 2], [0, 2, 3]].
template <typename Id>
__device__ void count_tile(const Id* __restrict__ ids,               // [num_slots]                   device
                           const int64_t* __restrict__ send_counts,  // [num_experts, num_ranks]      device
                           uint32_t* __restrict__ tile_counts,       // [num_tiles, num_experts]      device, written
                           uint32_t* __restrict__ begins,            // [num_experts, num_ranks + 1]  device, written
                           uint32_t* __restrict__ first_rows,        // [num_ranks, num_experts + 1]  device, written
                           void* __restrict__ row_ids,               // [num_slots]                   device, written
                           size_t wide, size_t tile, size_t num_tiles, size_t num_slots, size_t num_experts,
                           size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(unsigned, counts_E);
  if (blockIdx.x >= num_tiles) {
    const size_t line = (blockIdx.x - num_tiles) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (line < num_experts) {
      const int64_t* const counts_R = send_counts + line * num_ranks;
      scan_by_warp(begins + line * (num_ranks + 1), num_ranks, num_slots, [=](size_t r) { return counts_R[r]; });
    } else if (line - num_experts < num_ranks) {
      const int64_t* const counts_E0 = send_counts + (line - num_experts);
      scan_by_warp(first_rows + (line - num_experts) * (num_experts + 1), num_experts, num_slots,
                   [=](size_t e) { return counts_E0[e * num_ranks]; });
    }
    return;
  }
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) counts_E[e] = 0;
  __syncthreads();
  const size_t first = blockIdx.x * tile, end = least(first + tile, num_slots);
  for (size_t at = first + threadIdx.x; at < end; at += static_cast<size_t>(blockDim.x) * kIdsAtOnce) {
    unsigned experts[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const size_t s = at + static_cast<size_t>(i) * blockDim.x;
      experts[i] = s < end ? expert_of(ids[s], num_experts) : kNoExpert;
      if (s < end) set_index(row_ids, s, wide, -1);
    }
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i)
      if (experts[i] != kNoExpert) atomicAdd(&counts_E[experts[i]], 1u);
  }
  __syncthreads();
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) tile_counts[blockIdx.x * num_experts + e] = counts_E[e];
}
#define EVERMOE_PLAN_COUNT(name, Id)                                                                                  \
  extern "C" __global__ __launch_bounds__(512, 2) void name(                                                          \
      const Id* ids, const int64_t* send_counts, uint32_t* tile_counts, uint32_t* begins, uint32_t* first_rows,       \
      void* row_ids, size_t wide, size_t tile, size_t num_tiles, size_t num_slots, size_t num_experts,                \
      size_t num_ranks) {                                                                                             \
    count_tile(ids, send_counts, tile_counts, begins, first_rows, row_ids, wide, tile, num_tiles, num_slots, num_experts, \
               num_ranks);                                                                                            \
  }
EVERMOE_PLAN_COUNT(plan_count_i32, int32_t)
EVERMOE_PLAN_COUNT(plan_count_i64, int64_t)

// Finds the rows of occurrences of experts, -1 if there is none: for kNoExpert, and for occurrences beyond the counts
// or the buffer. All searches run at once. Example (as above), rank_rows = [0, 2, 5]: e = 1, j = 2: the last r with
// begins[1, r] <= 2 is 1; row = rank_rows[1] + first_rows[1, 1] + 2 - begins[1, 1] = 2 + 2 + 0 = 4.
__device__ inline void find_rows(const unsigned* experts, const uint32_t* occurrences, int64_t* rows,
                                 const uint32_t* __restrict__ begins, const uint32_t* __restrict__ first_rows,
                                 const uint32_t* rank_rows, size_t num_slots, size_t num_experts, size_t num_ranks) {
  uint32_t ranks[kIdsAtOnce] = {};
  uint32_t step = num_ranks ? 1u << (31 - __clz(static_cast<unsigned>(num_ranks))) : 0;
  for (; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const uint32_t later = ranks[i] + step;
      if (experts[i] != kNoExpert && later <= num_ranks && begins[experts[i] * (num_ranks + 1) + later] <= occurrences[i])
        ranks[i] = later;
    }
  }
#pragma unroll
  for (int i = 0; i < kIdsAtOnce; ++i) {
    const size_t e = experts[i], r = ranks[i];
    rows[i] = -1;
    if (experts[i] == kNoExpert || r == num_ranks) continue;
    const uint64_t row = static_cast<uint64_t>(rank_rows[r]) + first_rows[r * (num_experts + 1) + e] +
                         (occurrences[i] - begins[e * (num_ranks + 1) + r]);
    if (row < num_slots) rows[i] = static_cast<int64_t>(row);
  }
}

// Assigns a row to each slot. Each of the first num_tables warps takes a run of the tile's slots, and a table with the
// next occurrence of each expert, which starts after earlier tiles and the runs of earlier warps. Lanes with the same
// expert take consecutive occurrences, in order. Launch: num_tiles blocks of at least num_tables warps, after
// plan_count on the same stream; dynamic shared memory for num_tables * num_experts + num_ranks + 1 uint32_t.
// Example (as above), two tables, block 0: run 0 has ids 1, 0, run 1 has ids 1, 1. tables = [[0, 0], [1, 1]] after the
// sums: run 1 starts with occurrence 1 of expert 1. Its slot 3 is occurrence 2: row 4.
template <typename Id>
__device__ void place_tile(const Id* __restrict__ ids,                // [num_slots]                   device
                           const uint32_t* __restrict__ tile_counts,  // [num_tiles, num_experts]      device
                           const uint32_t* __restrict__ begins,       // [num_experts, num_ranks + 1]  device
                           const uint32_t* __restrict__ first_rows,   // [num_ranks, num_experts + 1]  device
                           void* __restrict__ row_ids,                // [num_slots]                   device, -1
                           void* __restrict__ positions,              // [num_slots]                   device, written
                           size_t wide, size_t tile, size_t num_tables, size_t num_slots, size_t num_experts,
                           size_t num_ranks) {
  EVERMOE_DYNAMIC_SHARED(unsigned, tables);  // [num_tables, num_experts], then the first row of each rank
  uint32_t* const rank_rows = tables + num_tables * num_experts;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (size_t i = threadIdx.x; i < num_tables * num_experts; i += blockDim.x) tables[i] = 0;
  __syncthreads();

  // Table 0: earlier tiles, divided among the warps. Table w + 1: the run of warp w. The last warp's run need not be
  // counted.
  for (size_t first = lane; first < num_experts; first += kWarp * kIdsAtOnce) {
    uint32_t sums[kIdsAtOnce] = {};
    for (size_t t = warp; t < blockIdx.x; t += warps) {
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i)
        if (first + i * kWarp < num_experts) sums[i] += tile_counts[t * num_experts + first + i * kWarp];
    }
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i)
      if (sums[i]) atomicAdd(&tables[first + i * kWarp], sums[i]);
  }
  const size_t last = least((blockIdx.x + size_t{1}) * tile, num_slots), run = (tile + num_tables - 1) / num_tables;
  const size_t begin = least(blockIdx.x * tile + warp * run, last), end = least(begin + run, last);
  if (warp + 1 < num_tables) {
    unsigned* const counts_E = tables + (warp + 1) * num_experts;
    for (size_t at = begin + lane; at < end; at += kWarp * kIdsAtOnce) {
      unsigned experts[kIdsAtOnce];
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i)
        experts[i] = at + i * kWarp < end ? expert_of(ids[at + i * kWarp], num_experts) : kNoExpert;
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i)
        if (experts[i] != kNoExpert) atomicAdd(&counts_E[experts[i]], 1u);
    }
  } else if (warp + 1 == warps) {
    scan_by_warp(rank_rows, num_ranks, num_slots, [=](size_t r) {
      return static_cast<int64_t>(first_rows[r * (num_experts + 1) + num_experts]);
    });
  }
  __syncthreads();
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    for (size_t w = 1; w < num_tables; ++w) tables[w * num_experts + e] += tables[(w - 1) * num_experts + e];
  }
  __syncthreads();
  if (warp >= num_tables) return;

  unsigned* const next_E = tables + warp * num_experts;
  for (size_t at = begin; at < end; at += kWarp * kIdsAtOnce) {
    unsigned experts[kIdsAtOnce], equals[kIdsAtOnce];
    uint32_t occurrences[kIdsAtOnce];
    int64_t rows[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const size_t s = at + i * kWarp + lane;
      experts[i] = s < end ? expert_of(ids[s], num_experts) : kNoExpert;
    }
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) equals[i] = __match_any_sync(kAllLanes, experts[i]);
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const bool routed = experts[i] != kNoExpert;
      const unsigned before = __popc(equals[i] & ((1u << lane) - 1));
      const uint32_t next = routed ? next_E[experts[i]] : 0;
      occurrences[i] = next + before;
      __syncwarp();
      if (routed && before == 0) next_E[experts[i]] = next + __popc(equals[i]);
      __syncwarp();
    }
    find_rows(experts, occurrences, rows, begins, first_rows, rank_rows, num_slots, num_experts, num_ranks);
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const size_t s = at + i * kWarp + lane;
      if (s < end) set_index(positions, s, wide, rows[i]);
      if (rows[i] >= 0) set_index(row_ids, static_cast<size_t>(rows[i]), wide, static_cast<int64_t>(s));
    }
  }
}
#define EVERMOE_PLAN_PLACE(name, Id)                                                                                  \
  extern "C" __global__ __launch_bounds__(512, kPlacingBlocks) void name(                                             \
      const Id* ids, const uint32_t* tile_counts, const uint32_t* begins, const uint32_t* first_rows, void* row_ids,  \
      void* positions, size_t wide, size_t tile, size_t num_tables, size_t num_slots, size_t num_experts,             \
      size_t num_ranks) {                                                                                             \
    place_tile(ids, tile_counts, begins, first_rows, row_ids, positions, wide, tile, num_tables, num_slots, num_experts, \
               num_ranks);                                                                                            \
  }
EVERMOE_PLAN_PLACE(plan_place_i32, int32_t)
EVERMOE_PLAN_PLACE(plan_place_i64, int64_t)
