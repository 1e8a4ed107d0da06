// exchange.cu -- exchange between ranks: the split of an expert's tokens, and the order of rows by source or by expert.
//
// Caller owns all memory.
#include "common.cuh"

// ---- regroup --------------------------------------------------------------------------------------
// A segment is the rows of one source for one expert, which are adjacent in both orders: by source (number r * E + e)
// and by expert (number e * R + r). regroup_starts -> regroup, on one stream.

// Returns i % inner * stride + i / inner; a 64-bit division takes several times as long as a 32-bit one.
__device__ inline size_t turned(size_t i, size_t inner, size_t stride) {
  const bool small = ((i | inner) >> 32) == 0;
  const size_t quotient = small ? static_cast<uint32_t>(i) / static_cast<uint32_t>(inner) : i / inner;
  return (i - quotient * inner) * stride + quotient;
}

// Writes starts[i] = sum of the cells before cell i, where cell i is counts[i % inner * stride + i / inner], or 0 if
// that is negative; returns, in the last thread, the sum of all cells. Each thread sums a run of cells, the block scans
// the sums, and each thread writes its run. `sums`: shared, one int64_t per thread; the block is a power of two.
// Example, counts = [[0, 1], [2, 1]] by columns (inner = 2, stride = 2): starts = [0, 0, 2, 3], the sum is 4.
__device__ inline int64_t scan_counts(const int64_t* __restrict__ counts,  // device
                                      int64_t* __restrict__ starts,        // [num_cells]  device, written
                                      int64_t* sums, size_t num_cells, size_t inner, size_t stride) {
  const size_t run = (num_cells + blockDim.x - 1) / blockDim.x;
  const size_t begin = threadIdx.x * run < num_cells ? threadIdx.x * run : num_cells;
  const size_t end = begin + run < num_cells ? begin + run : num_cells;
  int64_t sum = 0;
  for (size_t i = begin; i < end; ++i) sum += at_least_zero(counts[turned(i, inner, stride)]);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned step = 1; step < blockDim.x; step *= 2) {
    const int64_t left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += left;
    __syncthreads();
  }
  int64_t start = sums[threadIdx.x] - sum;
  for (size_t i = begin; i < end; ++i) {
    starts[i] = start;
    start += at_least_zero(counts[turned(i, inner, stride)]);
  }
  __syncthreads();
  return start;
}

// Computes the first rows of the segments in both orders, followed by the number of all rows. Negative counts are
// zeros.
// Example: counts = [[1, 2], [3, 0]]: by_source = [0, 1, 3, 6, 6], by_expert = [0, 1, 4, 6, 6].
// Launch: one block, dynamic shared memory for one int64_t per thread.
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

// Returns the first i with starts[i] > row, or num: computed by one thread, or by a warp that searches for one row and
// divides the rest into 32 parts at a time. Example: starts = [0, 1, 4, 6, 6], row = 4: 3.
__device__ inline size_t first_past(const int64_t* __restrict__ starts, size_t num, int64_t row) {
  size_t low = 0, high = num;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (starts[middle] > row) high = middle; else low = middle + 1;
  }
  return low;
}
__device__ inline size_t first_past_by_warp(const int64_t* __restrict__ starts, size_t num, int64_t row) {
  size_t low = 0, high = num;
  while (low < high) {
    const size_t part = (high - low + kWarp - 1) / kWarp, last = low + (threadIdx.x % kWarp + 1) * part - 1;
    const unsigned past = __ballot_sync(kAllLanes, last >= high || starts[last] > row);
    if (!past) return high;
    const size_t found = static_cast<size_t>(__ffs(static_cast<int>(past)) - 1);
    low += found * part;
    if (low + part - 1 < high) high = low + part - 1;
  }
  return low;
}

// out[to[i] + j] = rows[from[k] + j]: segment i of the one order is segment k = i % inner * outer + i / inner of the other,
// where the inner index of the output's order is the outer one of the input's. Rows past the counts become zeros.
// Example (as above), by expert: inner = 2 sources, outer = 2 experts. Row 4: the last i with by_expert[i] <= 4 is 2, whose k
// is 2 % 2 * 2 + 2 / 2 = 1: row by_source[1] + 4 - by_expert[2] = 1. All: rows 0 | 1 2 || 3 4 5 | become 0 3 4 5 | 1 2.
// Launch: 1-D grid of any size, blocks of a power of two, at least a warp; row_bytes is even.
extern "C" __global__ void regroup(const void* rows,                  // [num_rows, row_bytes]  device
                                   const int64_t* __restrict__ from,  // [inner * outer + 1]    device, in the order of rows
                                   const int64_t* __restrict__ to,    // [outer * inner + 1]    device, in the order of out
                                   void* out,                         // [num_rows, row_bytes]  device, written
                                   size_t num_rows, size_t row_bytes, size_t inner, size_t outer) {
  const size_t num_segments = inner * outer;
  const bool by_warp = row_bytes > kWarp / 2 * 16; // more than half a warp takes a row, whatever the units: then all of it does
  int64_t begin = 0, end = 0, shift = 0; // of the previous row's segment, which is usually this row's, too
  copy_rows(rows, out, num_rows, row_bytes, num_rows, [=](size_t row) mutable {
    const int64_t at = static_cast<int64_t>(row);
    if (at < begin || at >= end) {
      const size_t next = by_warp ? first_past_by_warp(to, num_segments + 1, at) : first_past(to, num_segments + 1, at);
      if (next == 0 || next > num_segments) return num_rows;
      begin = to[next - 1];
      end = to[next];
      shift = from[turned(next - 1, inner, outer)] - begin;
    }
    return static_cast<size_t>(at + shift);
  });
}

// ---- split of tokens --------------------------------------------------------------------------------
// The integers of src/dispatch/expert.rs: Lazarus, Algorithm 1. Of t tokens of an expert on r replicas, a rank with R
// of them has room for t * R / r. A rank keeps tokens up to its room and sends the rest to the ranks with room left, in
// proportion to it. Room and left-over tokens are scaled by r; shares have the denominator r * (sum of room).
using Wide = __int128;
using UnsignedWide = unsigned __int128;
constexpr uint64_t kMaxScale = uint64_t{1} << 61;  // of t * r, so that products of two such numbers fit

// A rank with room left.
struct Holder {
  Wide owed;     // exact minus rounded tokens of the rows so far, over the common denominator
  int64_t room;  // scaled
  uint32_t rank;
};
static_assert(sizeof(Holder) == kHolderBytes && sizeof(Wide) == kClaimBytes, "what the launcher asks shared memory for");

// A holder's claim to an odd token: the rest that the floor cut off, plus its accumulated error. None without a rest.
constexpr Wide kNoClaim = static_cast<Wide>(UnsignedWide{1} << 127);

// Sum of one number per lane, saturated at kMaxScale + 1, which also stands for negative numbers.
__device__ inline uint64_t add_up_to(uint64_t sum, uint64_t more) {
  return more > kMaxScale || sum + more > kMaxScale ? kMaxScale + 1 : sum + more;
}
__device__ inline uint64_t warp_sum(uint64_t mine) {
  for (unsigned other = kWarp / 2; other > 0; other /= 2) mine = add_up_to(mine, __shfl_xor_sync(kAllLanes, mine, other));
  return mine;
}

// Returns the quotient (below 2^62) and the remainder.
__device__ inline int64_t divide(UnsignedWide share, UnsignedWide denominator, UnsignedWide& rest) {
  if (!(share >> 64) && !(denominator >> 64)) {
    const uint64_t narrow = static_cast<uint64_t>(denominator), quotient = static_cast<uint64_t>(share) / narrow;
    rest = static_cast<uint64_t>(share) - quotient * narrow; // computing the remainder separately would divide once more
    return static_cast<int64_t>(quotient);
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

// The split of one expert.
struct Expert {
  const int64_t* tokens_R;    // [num_ranks]                       device
  const int64_t* replicas_E;  // [num_ranks], num_experts apart    device
  int64_t* send_R;            // [num_ranks]                       device
  int64_t* receive_E;         // [num_ranks], num_experts apart    device
  size_t num_experts, num_ranks, rank;
  int64_t total, held;        // tokens and replicas of all ranks
  uint64_t room_sum;          // scaled
  UnsignedWide denominator;   // of all shares
};

// Lists the ranks with room left, ascending; returns their number and the sum of their room. Every warp finds them, the
// first one writes.
__device__ inline size_t find_holders(const Expert& expert, Holder* holders, uint64_t& room_sum) {
  const unsigned lane = threadIdx.x % kWarp;
  size_t num_holders = 0;
  uint64_t mine = 0;
  for (size_t first = 0; first < expert.num_ranks; first += kWarp) {
    const size_t rank = first + lane;
    const int64_t replicas = rank < expert.num_ranks ? expert.replicas_E[rank * expert.num_experts] : 0;
    const int64_t room = replicas > 0 ? expert.total * replicas - expert.tokens_R[rank] * expert.held : 0;
    const unsigned with_room = __ballot_sync(kAllLanes, room > 0);
    if (room > 0) {
      mine += static_cast<uint64_t>(room);
      const size_t at = num_holders + __popc(with_room & ((1u << lane) - 1));
      if (threadIdx.x < kWarp) holders[at] = {0, room, static_cast<uint32_t>(rank)};
    }
    num_holders += __popc(with_room);
  }
  room_sum = warp_sum(mine);
  return num_holders;
}

// Splits the row of a source without its odd tokens, by one warp: writes the floors, and the rests to claims. The last
// claim is for the tokens that the source keeps. Returns the number of odd tokens.
__device__ inline uint32_t split_row(const Expert& expert, const Holder* holders, Wide* claims, size_t num_holders,
                                     size_t source, int64_t count, int64_t kept) {
  const unsigned lane = threadIdx.x % kWarp;
  const bool is_ours = source == expert.rank;
  if (count == 0) return 0;
  if (count * expert.held <= kept) {
    if (is_ours && lane == 0) expert.send_R[source] = expert.receive_E[source * expert.num_experts] = count;
    return 0;
  }
  const uint64_t left_over = static_cast<uint64_t>(count * expert.held - kept);
  uint64_t floors = 0;
  for (size_t h = lane; h <= num_holders; h += kWarp) {
    const bool is_own = h == num_holders;
    const UnsignedWide share = is_own ? static_cast<UnsignedWide>(kept) * expert.room_sum
                                      : static_cast<UnsignedWide>(left_over) * static_cast<uint64_t>(holders[h].room);
    UnsignedWide rest;
    const int64_t floor = divide(share, expert.denominator, rest);
    const size_t destination = is_own ? source : holders[h].rank;
    claims[h] = rest ? static_cast<Wide>(rest) : kNoClaim;
    if (is_ours) expert.send_R[destination] = floor;
    if (destination == expert.rank) expert.receive_E[source * expert.num_experts] = floor;
    floors += static_cast<uint64_t>(floor);
  }
  return static_cast<uint32_t>(static_cast<uint64_t>(count) - warp_sum(floors));
}

// Gives the odd tokens of a row to the largest claims, ties to lower ranks. By the given number of threads: one warp,
// or the block. There are more rests than odd tokens, as their sum is the number of odd tokens.
__device__ inline void give_odd_tokens(const Expert& expert, Holder* holders, Wide* claims, size_t num_holders, size_t source,
                                       uint32_t odd, unsigned threads) {
  for (size_t h = threadIdx.x; h < num_holders; h += threads)
    if (claims[h] != kNoClaim) claims[h] += holders[h].owed;
  if (threads == kWarp) __syncwarp(); else __syncthreads();
  for (size_t h = threadIdx.x; h <= num_holders; h += threads) {
    const Wide claim = claims[h];
    if (claim == kNoClaim) continue;
    const auto rank_of = [=](size_t i) { return i < num_holders ? static_cast<size_t>(holders[i].rank) : source; };
    const size_t destination = rank_of(h);
    uint32_t before = 0;
    for (size_t other = 0; other <= num_holders; ++other)
      before += claims[other] > claim || (claims[other] == claim && rank_of(other) < destination);
    const bool extra = before < odd;
    if (h < num_holders) holders[h].owed = extra ? claim - static_cast<Wide>(expert.denominator) : claim;
    if (extra && source == expert.rank) ++expert.send_R[destination];
    if (extra && destination == expert.rank) ++expert.receive_E[source * expert.num_experts];
  }
}

// Computes what `rank` sends and receives. An expert with negative numbers, with tokens and no replica, or with more
// than kMaxScale tokens x replicas sends nothing. Rows of many sources are divided at once, a warp each; only the
// receivers of their odd tokens depend on earlier rows. Launch: one block of full warps per expert, dynamic shared
// memory for num_claims claims, num_ranks holders and num_ranks uint32_t. num_claims exceeds num_ranks; the larger it
// is, the more sources are divided at once.
// Example: one expert, tokens = [5, 0, 1], a replica on each rank: t = 6, r = 3, room for 2 each. Rank 0 keeps 2 and
// has 3 left over for the remaining room [-, 2, 1]: it sends [2, 2, 1], and rank 2 keeps its 1. Send of rank 0 = [2, 2,
// 1], receive of rank 2 = [1, 0, 1].
extern "C" __global__ __launch_bounds__(256) void split_tokens(
    const int64_t* __restrict__ tokens,    // [num_experts, num_ranks]  device
    const int64_t* __restrict__ replicas,  // [num_ranks, num_experts]  device
    int64_t* __restrict__ send,            // [num_experts, num_ranks]  device, written
    int64_t* __restrict__ receive,         // [num_ranks, num_experts]  device, written
    size_t num_claims, size_t num_experts, size_t num_ranks, size_t rank) {
  EVERMOE_DYNAMIC_SHARED(Wide, all_claims);
  Holder* const holders = reinterpret_cast<Holder*>(all_claims + num_claims);
  uint32_t* const odds = reinterpret_cast<uint32_t*>(holders + num_ranks);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const size_t e = blockIdx.x;
  Expert expert{tokens + e * num_ranks, replicas + e, send + e * num_ranks, receive + e, num_experts, num_ranks, rank, 0, 0, 0, 0};
  for (size_t r = threadIdx.x; r < num_ranks; r += blockDim.x) expert.send_R[r] = expert.receive_E[r * num_experts] = 0;

  uint64_t my_total = 0, my_held = 0;
  for (size_t r = lane; r < num_ranks; r += kWarp) {
    my_total = add_up_to(my_total, static_cast<uint64_t>(expert.tokens_R[r]));
    my_held = add_up_to(my_held, static_cast<uint64_t>(expert.replicas_E[r * num_experts]));
  }
  const uint64_t all = warp_sum(my_total), replicas_of_all = warp_sum(my_held);
  if (all == 0 || replicas_of_all == 0 || static_cast<UnsignedWide>(all) * replicas_of_all > kMaxScale) return;
  expert.total = static_cast<int64_t>(all);
  expert.held = static_cast<int64_t>(replicas_of_all);
  const size_t num_holders = find_holders(expert, holders, expert.room_sum);
  expert.denominator = static_cast<UnsignedWide>(replicas_of_all) * expert.room_sum;
  // Later sources send nothing to a rank without room.
  const bool has_room = expert.total * expert.replicas_E[rank * num_experts] > expert.tokens_R[rank] * expert.held;
  const size_t num_sources = has_room ? num_ranks : rank + 1, num_entries = num_holders + 1;
  const size_t fit = num_claims / num_entries, at_once = fit < num_ranks ? fit : num_ranks;
  const unsigned threads = num_entries <= kWarp ? kWarp : blockDim.x;
  __syncthreads();

  for (size_t first = 0; first < num_sources; first += at_once) {
    const size_t sources = first + at_once < num_sources ? at_once : num_sources - first;
    for (size_t begin = warp; begin < sources; begin += static_cast<size_t>(warps) * kWarp) {
      const size_t mine = first + begin + static_cast<size_t>(lane) * warps;
      const int64_t my_count = mine < num_sources ? expert.tokens_R[mine] : 0;
      const int64_t my_kept = mine < num_sources ? expert.total * expert.replicas_E[mine * num_experts] : 0;
      for (unsigned i = 0; i < kWarp && begin + static_cast<size_t>(i) * warps < sources; ++i) {
        const size_t row = begin + static_cast<size_t>(i) * warps;
        const int64_t count = __shfl_sync(kAllLanes, my_count, i), kept = __shfl_sync(kAllLanes, my_kept, i);
        const uint32_t odd = split_row(expert, holders, all_claims + row * num_entries, num_holders, first + row, count, kept);
        if (lane == 0) odds[row] = odd;
      }
    }
    __syncthreads();
    for (size_t row = 0; threadIdx.x < threads && row < sources; ++row) {
      if (odds[row] == 0) continue;
      give_odd_tokens(expert, holders, all_claims + row * num_entries, num_holders, first + row, odds[row], threads);
    }
    __syncthreads();
  }
}
