// exchange.cu -- what crosses ranks: how many tokens of an expert go where, and rows from the order of their sources to
// that of their experts.
//
// Caller owns all memory.
#include "common.cuh"

// ---- regroup --------------------------------------------------------------------------------------
// A segment is the rows of one source for one expert, which are next to each other in both orders: by source
// (number r * E + e) and by expert (number e * R + r). regroup_starts -> regroup, on one stream.

// First rows of the segments in both orders, and the number of all rows behind them. Negative counts are zeros.
// Example: counts = [[1, 2], [3, 0]]: by_source = [0, 1, 3, 6, 6], by_expert = [0, 1, 4, 6, 6].
// Launch: one block, dynamic shared memory for an int64_t of each thread.
extern "C" __global__ void regroup_starts(const int64_t* __restrict__ counts,  // [num_sources, num_experts]      device
                                          int64_t* __restrict__ by_source,     // [num_sources * num_experts + 1]  device, written
                                          int64_t* __restrict__ by_expert,     // [num_experts * num_sources + 1]  device, written
                                          size_t num_sources, size_t num_experts) {
  EVERMOE_DYNAMIC_SHARED(int64_t, sums);  // [blockDim.x]
  const size_t num_segments = num_sources * num_experts;
  scan_counts(counts, by_source, sums, num_segments, num_segments, 1);
  const int64_t num_rows = scan_counts(counts, by_expert, sums, num_segments, num_sources, num_experts);
  if (threadIdx.x == blockDim.x - 1) by_source[num_segments] = by_expert[num_segments] = num_rows;
}

// out[to[i] + j] = rows[from[k] + j]: segment i of the one order is segment k = i % inner * outer + i / inner of the other,
// where the inner index of the output's order is the outer one of the input's. Rows past the counts become zeros.
// Example (as above), by expert: inner = 2 sources, outer = 2 experts. Row 4: the last i with by_expert[i] <= 4 is 2, whose k
// is 2 % 2 * 2 + 2 / 2 = 1: row by_source[1] + 4 - by_expert[2] = 1. All: rows 0 | 1 2 || 3 4 5 | become 0 3 4 5 | 1 2.
// Launch: 1-D grid of any size, blocks of a power of two; row_bytes is even.
extern "C" __global__ void regroup(const void* rows,                  // [num_rows, row_bytes]  device
                                   const int64_t* __restrict__ from,  // [inner * outer + 1]    device, in the order of rows
                                   const int64_t* __restrict__ to,    // [outer * inner + 1]    device, in the order of out
                                   void* out,                         // [num_rows, row_bytes]  device, written
                                   size_t num_rows, size_t row_bytes, size_t inner, size_t outer) {
  const size_t num_segments = inner * outer;
  copy_rows(rows, out, num_rows, row_bytes, num_rows, [=](size_t row) {
    size_t low = 0, high = num_segments + 1;  // the first i with to[i] > row
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (to[middle] > static_cast<int64_t>(row)) high = middle; else low = middle + 1;
    }
    if (low == 0 || low > num_segments) return num_rows;
    const size_t i = low - 1;
    return static_cast<size_t>(from[i % inner * outer + i / inner] + static_cast<int64_t>(row) - to[i]);
  });
}

// ---- split of tokens --------------------------------------------------------------------------------
// The integers of src/dispatch/expert.rs: Lazarus, Algorithm 1. Of t tokens of an expert on r replicas, a rank with R of
// them has room for t * R / r. A rank keeps what it has room for and sends what is left over to the ranks with room left, in
// proportion to it. Room and left-over tokens are scaled by r, shares have the denominator r * (sum of room).
using Wide = __int128;
using UnsignedWide = unsigned __int128;
constexpr uint64_t kMaxScale = uint64_t{1} << 61;  // of t * r, so that products of two such numbers fit

// A rank with room left or, behind them, what the source keeps itself.
struct Holder {
  Wide owed;      // exact minus rounded tokens of the rows so far, over the common denominator
  Wide claim;     // what the floor cut off, and what it was owed: the largest get the odd tokens
  int64_t room;   // scaled
  int64_t floor;  // of its share of this row
  uint32_t rank;
  uint32_t has_rest;  // whether the floor cut anything off
};
struct Source { int64_t count, kept; };  // tokens of a rank; what it has room for, scaled
static_assert(sizeof(Holder) == kHolderBytes && sizeof(Source) == kSourceBytes, "what the launcher asks shared memory for");

// Sum of a number of each lane, at most kMaxScale + 1: what is more, or was negative, is that.
__device__ inline uint64_t add_up_to(uint64_t sum, uint64_t more) {
  return more > kMaxScale || sum + more > kMaxScale ? kMaxScale + 1 : sum + more;
}
__device__ inline uint64_t warp_sum(uint64_t* sums, uint64_t mine) {
  sums[threadIdx.x] = mine;
  __syncwarp();
  uint64_t total = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) total = add_up_to(total, sums[lane]);
  __syncwarp();
  return total;
}

// Quotient (below 2^62) and remainder.
__device__ inline int64_t divide(UnsignedWide share, UnsignedWide denominator, UnsignedWide& rest) {
  if (!(share >> 64) && !(denominator >> 64)) {
    const uint64_t narrow = static_cast<uint64_t>(denominator);
    rest = static_cast<uint64_t>(share) % narrow;
    return static_cast<int64_t>(static_cast<uint64_t>(share) / narrow);
  }
  uint64_t quotient = 0;
  rest = 0;
  for (int bit = 127; bit >= 0; --bit) {
    rest = rest << 1 | (share >> bit & 1);
    quotient <<= 1;
    if (rest >= denominator) {
      rest -= denominator;
      quotient |= 1;
    }
  }
  return static_cast<int64_t>(quotient);
}

// Whether `one` gets an odd token before `other`.
__device__ inline bool precedes(const Holder& one, const Holder& other) {
  if (one.has_rest != other.has_rest) return one.has_rest;
  if (one.claim != other.claim) return one.claim > other.claim;
  return one.rank < other.rank;
}

// Lists the ranks with room left, ascending; returns how many they are, and the sum of their room.
__device__ inline size_t find_holders(const int64_t* tokens_R, const int64_t* replicas_E, Holder* holders, uint64_t* sums,
                                      int64_t total, int64_t held, size_t num_experts, size_t num_ranks, uint64_t& room_sum) {
  size_t num_holders = 0;
  uint64_t mine = 0;
  for (size_t first = 0; first < num_ranks; first += kWarp) {
    const size_t rank = first + threadIdx.x;
    const int64_t replicas = rank < num_ranks ? replicas_E[rank * num_experts] : 0;
    const int64_t room = replicas > 0 ? total * replicas - tokens_R[rank] * held : 0;
    const unsigned same = __match_any_sync(kAllLanes, static_cast<unsigned>(room > 0));
    const unsigned with_room = room > 0 ? same : ~same;
    if (room > 0) {
      Holder& holder = holders[num_holders + __popc(with_room & ((1u << threadIdx.x) - 1))];
      holder.owed = 0;
      holder.room = room;
      holder.rank = static_cast<uint32_t>(rank);
      mine += static_cast<uint64_t>(room);
    }
    num_holders += __popc(with_room);
  }
  room_sum = warp_sum(sums, mine);
  return num_holders;
}

// The row of one source with tokens left over: lanes take holders in turn. Afterwards `floor` holds the tokens of each.
__device__ inline void split_row(Holder* holders, uint64_t* sums, size_t num_holders, const Source& row, size_t source,
                                 int64_t held, uint64_t room_sum) {
  const uint64_t left_over = static_cast<uint64_t>(row.count * held - row.kept);
  const UnsignedWide denominator = static_cast<UnsignedWide>(held) * room_sum;
  const size_t num_entries = num_holders + (row.kept > 0);
  uint64_t floors = 0;
  for (size_t h = threadIdx.x; h < num_entries; h += kWarp) {
    Holder& holder = holders[h];
    const bool is_own = h == num_holders;
    if (is_own) {
      holder.owed = 0;
      holder.rank = static_cast<uint32_t>(source);
    }
    const UnsignedWide share = is_own ? static_cast<UnsignedWide>(row.kept) * room_sum
                                      : static_cast<UnsignedWide>(left_over) * static_cast<uint64_t>(holder.room);
    UnsignedWide rest;
    holder.floor = divide(share, denominator, rest);
    holder.has_rest = rest != 0;
    holder.claim = static_cast<Wide>(rest) + holder.owed;
    floors += static_cast<uint64_t>(holder.floor);
  }
  const uint64_t odd = static_cast<uint64_t>(row.count) - warp_sum(sums, floors);
  for (size_t h = threadIdx.x; h < num_entries; h += kWarp) {
    Holder& holder = holders[h];
    uint64_t before = 0;
    for (size_t other = 0; odd > 0 && other < num_entries; ++other) before += precedes(holders[other], holder);
    const bool extra = before < odd;
    holder.owed = extra ? holder.claim - static_cast<Wide>(denominator) : holder.claim;
    holder.floor += extra;
  }
  __syncwarp();
}

// What `rank` sends and receives. An expert with negative numbers, with tokens and no replica, or with more than kMaxScale
// tokens x replicas sends nothing. Launch: one block of 32 threads for each expert, dynamic shared memory for num_ranks + 1
// Holders, 32 Sources and 32 uint64_t.
// Example: one expert, tokens = [5, 0, 1], a replica on each rank: t = 6, r = 3, room for 2 each. Rank 0 keeps 2 and has 3 left
// over for the room left of [-, 2, 1]: it sends [2, 2, 1], and rank 2 keeps its 1: send of rank 0 = [2, 2, 1], receive of rank 2 =
// [1, 0, 1].
extern "C" __global__ void split_tokens(const int64_t* __restrict__ tokens,    // [num_experts, num_ranks]  device
                                        const int64_t* __restrict__ replicas,  // [num_ranks, num_experts]  device
                                        int64_t* __restrict__ send,            // [num_experts, num_ranks]  device, zeroed
                                        int64_t* __restrict__ receive,         // [num_ranks, num_experts]  device, zeroed
                                        size_t num_experts, size_t num_ranks, size_t rank) {
  EVERMOE_DYNAMIC_SHARED(Holder, holders);
  Source* const sources = reinterpret_cast<Source*>(holders + num_ranks + 1);
  uint64_t* const sums = reinterpret_cast<uint64_t*>(sources + kWarp);
  const size_t e = blockIdx.x;
  const int64_t* const tokens_R = tokens + e * num_ranks;
  uint64_t my_total = 0, my_held = 0;
  for (size_t r = threadIdx.x; r < num_ranks; r += kWarp) {
    my_total = add_up_to(my_total, static_cast<uint64_t>(tokens_R[r]));
    my_held = add_up_to(my_held, static_cast<uint64_t>(replicas[r * num_experts + e]));
  }
  const uint64_t all = warp_sum(sums, my_total), replicas_of_all = warp_sum(sums, my_held);
  if (all == 0 || replicas_of_all == 0 || static_cast<UnsignedWide>(all) * replicas_of_all > kMaxScale) return;
  const int64_t total = static_cast<int64_t>(all), held = static_cast<int64_t>(replicas_of_all);
  uint64_t room_sum;
  const size_t num_holders =
      find_holders(tokens_R, replicas + e, holders, sums, total, held, num_experts, num_ranks, room_sum);
  for (size_t source = 0; source < num_ranks; ++source) {
    const size_t in_round = source % kWarp;
    if (in_round == 0) {
      __syncwarp();
      const size_t mine = source + threadIdx.x;
      if (mine < num_ranks) sources[threadIdx.x] = {tokens_R[mine], total * replicas[mine * num_experts + e]};
      __syncwarp();
    }
    const Source row = sources[in_round];
    if (row.count == 0) continue;
    if (row.count * held <= row.kept) {
      if (source == rank && threadIdx.x == 0) send[e * num_ranks + rank] = receive[rank * num_experts + e] = row.count;
      continue;
    }
    split_row(holders, sums, num_holders, row, source, held, room_sum);
    for (size_t h = threadIdx.x; h < num_holders + (row.kept > 0); h += kWarp) {
      const size_t destination = holders[h].rank;
      if (source == rank) send[e * num_ranks + destination] = holders[h].floor;
      if (destination == rank) receive[source * num_experts + e] = holders[h].floor;
    }
    __syncwarp();
  }
}
