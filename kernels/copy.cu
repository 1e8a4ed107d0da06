// copy.cu -- scattered tensors <-> chunks of a fixed size, hashed on the way.
//
// The chunks are one stream of bytes, cut every chunk_bytes. Each tensor starts at a multiple of 16 of the stream; gaps
// and the end are zero. Every 4096 bytes are a *block* with a hash: XXH3-64 (seed 0) of the crate xxhash-rust.
//
// Example: tensors of 20 and 5 bytes, first_byte 0, one block:
//   stream: tensor 0 in bytes 0..20, zeros in 20..32, tensor 1 in 32..37, zeros in 37..4096; hashes[0] = XXH3(stream).
//
// XXH3 of a block adds 64 stripes of 64 bytes to 8 accumulators. Accumulators 2q and 2q + 1 see only the bytes 16q..16q
// + 16 of each stripe. So four threads share a block, each with accesses of 16 bytes, and combine at the end.
#include "common.cuh"

constexpr unsigned kStripes = 64;   // of a block
constexpr unsigned kAtOnce = 8;     // loads in flight
constexpr unsigned kKeys = 18;      // words of the secret that a thread uses

struct alignas(16) Unit { uint64_t low, high; };  // 16 bytes of the stream

// ---- XXH3 ----------------------------------------------------------------------------------------
constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;

// The default secret as little-endian words, and the initial accumulators.
__device__ const uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
__device__ const uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                       kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

__device__ inline uint64_t low_by_high(uint64_t value) { return (value & 0xffffffff) * (value >> 32); }

// State of one of the four threads of a block.
struct Lanes {
  uint64_t key[kKeys];  // secret from byte 16 * quarter
  uint64_t low, high;

  __device__ explicit Lanes(unsigned quarter) {
    for (unsigned i = 0; i < kKeys; ++i) key[i] = kSecret[2 * quarter + i];
  }
  __device__ void start(unsigned quarter) {
    low = kStart[2 * quarter];
    high = kStart[2 * quarter + 1];
  }
  // Bytes from..from + 8 of this thread's part of the secret.
  __device__ uint64_t key_at(unsigned from) const {
    return from % 8 ? key[from / 8] >> 8 * (from % 8) | key[from / 8 + 1] << (64 - 8 * (from % 8)) : key[from / 8];
  }
  __device__ void add(Unit unit, unsigned from) {
    low += unit.high + low_by_high(unit.low ^ key_at(from));
    high += unit.low + low_by_high(unit.high ^ key_at(from + 8));
  }
  // As `add`, of a stripe whose number is only known at run time: an array of registers has no such elements.
  __device__ void add_stripe(Unit unit, unsigned quarter, unsigned stripe) {
    low += unit.high + low_by_high(unit.low ^ kSecret[2 * quarter + stripe]);
    high += unit.low + low_by_high(unit.high ^ kSecret[2 * quarter + stripe + 1]);
  }
  // Called at the end of each 1024 bytes.
  __device__ void scramble() {
    low = (low ^ low >> 47 ^ key[16]) * kPrime32_1;
    high = (high ^ high >> 47 ^ key[17]) * kPrime32_1;
  }
  // This thread's addend of the hash.
  __device__ uint64_t part() const {
    const uint64_t a = low ^ key_at(11), b = high ^ key_at(19);
    return a * b ^ __umul64hi(a, b);
  }
};

// Returns the hash of a number of bytes, the same in each of the four threads; the entire warp must take part.
__device__ inline uint64_t finish_hash(const Lanes& lanes, uint64_t bytes = kBlockBytes) {
  uint64_t sum = lanes.part();
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  sum += bytes * kPrime64_1;
  sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
  return sum ^ sum >> 32;
}

// Hashes the units that `load` returns for each stripe, and passes them to `store`.
template <typename Load, typename Store>
__device__ inline void hash_units(Lanes& lanes, unsigned quarter, Load load, Store store) {
  lanes.start(quarter);
#pragma unroll 1
  for (unsigned kilobyte = 0; kilobyte < 4; ++kilobyte) {
#pragma unroll
    for (unsigned half = 0; half < 16; half += kAtOnce) {
      Unit units[kAtOnce];
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) units[i] = load(kilobyte * 16 + half + i);
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) store(kilobyte * 16 + half + i, units[i]);
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        // The very last stripe has its own position in the secret.
        if (half + i == 15 && kilobyte == 3) lanes.add(units[i], 121);
        else lanes.add(units[i], 8 * (half + i));
      }
    }
    if (kilobyte < 3) lanes.scramble();
  }
}

// ---- tensors -------------------------------------------------------------------------------------
// The first span that ends after a byte of the stream; num_spans if none does.
__device__ inline size_t find_span(const Span* __restrict__ spans, size_t num_spans, uint64_t byte) {
  size_t low = 0, high = num_spans;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (spans[middle].start + spans[middle].bytes > byte) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Returns the address of a block of the stream that belongs to one tensor and is aligned to 16; otherwise null.
__device__ inline unsigned char* full_block(const Span* __restrict__ spans, size_t num_spans, size_t span, uint64_t block) {
  if (span == num_spans) return nullptr;
  const Span here = spans[span];
  if (here.start > block || here.start + here.bytes < block + kBlockBytes) return nullptr;
  unsigned char* const at = here.at + (block - here.start);
  return reinterpret_cast<uintptr_t>(at) % 16 ? nullptr : at;
}

// Loads up to 16 bytes at any alignment, followed by zeros.
__device__ inline Unit load_bytes(const unsigned char* at, uint64_t bytes) {
  if (bytes >= 16 && reinterpret_cast<uintptr_t>(at) % 16 == 0) return *reinterpret_cast<const Unit*>(at);
  if (bytes >= 16 && reinterpret_cast<uintptr_t>(at) % 4 == 0) {
    const auto words = reinterpret_cast<const uint32_t*>(at);
    return {words[0] | static_cast<uint64_t>(words[1]) << 32, words[2] | static_cast<uint64_t>(words[3]) << 32};
  }
  Unit unit = {0, 0};
  for (unsigned i = 0; i < 16; ++i) {
    const uint64_t byte = i < bytes ? at[i] : 0;
    if (i < 8) unit.low |= byte << 8 * i;
    else unit.high |= byte << 8 * (i - 8);
  }
  return unit;
}

__device__ inline void store_bytes(unsigned char* at, uint64_t bytes, Unit unit) {
  if (bytes >= 16 && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    *reinterpret_cast<Unit*>(at) = unit;
  } else if (bytes >= 16 && reinterpret_cast<uintptr_t>(at) % 4 == 0) {
    const auto words = reinterpret_cast<uint32_t*>(at);
    words[0] = static_cast<uint32_t>(unit.low);
    words[1] = static_cast<uint32_t>(unit.low >> 32);
    words[2] = static_cast<uint32_t>(unit.high);
    words[3] = static_cast<uint32_t>(unit.high >> 32);
  } else {
    for (unsigned i = 0; i < 16 && i < bytes; ++i)
      at[i] = static_cast<unsigned char>((i < 8 ? unit.low >> 8 * i : unit.high >> 8 * (i - 8)) & 0xff);
  }
}

// Advances to the span that contains the unit at `byte`, or to the next one; returns the number of its bytes in the
// unit.
__device__ inline uint64_t bytes_here(const Span* __restrict__ spans, size_t num_spans, size_t& span, uint64_t byte) {
  while (span < num_spans && spans[span].start + spans[span].bytes <= byte) ++span;
  if (span == num_spans || spans[span].start > byte) return 0;
  return spans[span].start + spans[span].bytes - byte;
}

// ---- kernels -------------------------------------------------------------------------------------
// Calls body(block, quarter, lanes) with full warps; block num_blocks means none.
template <typename Body>
__device__ inline void for_blocks(size_t num_blocks, Body body) {
  const unsigned quarter = threadIdx.x % kQuarters;
  Lanes lanes(quarter);
  // All lanes of a warp make the same number of iterations, as they exchange values.
  const size_t at_once = num_threads() / kQuarters, mine = global_thread() / kQuarters;
  const size_t warp_first = mine - threadIdx.x % kWarp / kQuarters;
  for (size_t first = warp_first; first < num_blocks; first += at_once) {
    const size_t block = first + threadIdx.x % kWarp / kQuarters;
    body(block < num_blocks ? block : num_blocks, quarter, lanes);
  }
}

// Launch: 1-D grid of any size, blockDim.x 32 or 64.
extern "C" __global__ __launch_bounds__(kCopyThreads) void pack_chunks(const Span* __restrict__ spans,   // [num_spans]                device
                                       size_t num_spans,
                                       uint64_t first_byte,              // of the stream, a multiple of 4096
                                       size_t num_blocks,
                                       unsigned char* __restrict__ chunks,  // [num_blocks * 4096]     device, aligned to 16
                                       uint64_t* __restrict__ hashes) {     // [num_blocks]            device
  for_blocks(num_blocks, [=](size_t block, unsigned quarter, Lanes& lanes) {
    if (block < num_blocks) {
      const uint64_t byte = first_byte + block * kBlockBytes;
      Unit* const out = reinterpret_cast<Unit*>(chunks + block * kBlockBytes) + quarter;
      const auto store = [=](unsigned stripe, Unit unit) { out[stripe * kQuarters] = unit; };
      size_t span = find_span(spans, num_spans, byte);
      if (const unsigned char* const direct = full_block(spans, num_spans, span, byte)) {
        const Unit* const in = reinterpret_cast<const Unit*>(direct) + quarter;
        hash_units(lanes, quarter, [=](unsigned stripe) { return in[stripe * kQuarters]; }, store);
      } else {
        const auto load = [&](unsigned stripe) -> Unit {
          const uint64_t here = byte + stripe * 64 + quarter * 16;
          const uint64_t bytes = bytes_here(spans, num_spans, span, here);
          return bytes ? load_bytes(spans[span].at + (here - spans[span].start), bytes) : Unit{0, 0};
        };
        hash_units(lanes, quarter, load, store);
      }
    }
    const uint64_t hash = finish_hash(lanes);
    if (block < num_blocks && quarter == 0) hashes[block] = hash;
  });
}

// Launch: as pack_chunks.
extern "C" __global__ __launch_bounds__(kCopyThreads) void hash_blocks(const unsigned char* __restrict__ chunks,  // [num_blocks * 4096]  device, aligned to 16
                                       size_t num_blocks,
                                       uint64_t* __restrict__ hashes) {           // [num_blocks]         device
  for_blocks(num_blocks, [=](size_t block, unsigned quarter, Lanes& lanes) {
    if (block < num_blocks) {
      const Unit* const in = reinterpret_cast<const Unit*>(chunks + block * kBlockBytes) + quarter;
      hash_units(lanes, quarter, [=](unsigned stripe) { return in[stripe * kQuarters]; }, [](unsigned, Unit) {});
    }
    const uint64_t hash = finish_hash(lanes);
    if (block < num_blocks && quarter == 0) hashes[block] = hash;
  });
}

// A block whose hash differs from the expected one is counted and writes nothing: it is read a second time, from the
// cache, only after its hash was found right. Launch: as pack_chunks.
extern "C" __global__ __launch_bounds__(kCopyThreads) void unpack_chunks(const Span* __restrict__ spans,   // [num_spans]              device
                                         size_t num_spans,
                                         uint64_t first_byte,              // of the stream, a multiple of 4096
                                         size_t num_blocks,
                                         const unsigned char* __restrict__ chunks,  // [num_blocks * 4096]  device, aligned to 16
                                         const uint64_t* __restrict__ hashes,       // [num_blocks]         device
                                         unsigned long long* __restrict__ wrong,    // [chunks]             device, added to
                                         size_t chunk_blocks) {
  for_blocks(num_blocks, [=](size_t block, unsigned quarter, Lanes& lanes) {
    const Unit* const in = reinterpret_cast<const Unit*>(chunks + block * kBlockBytes) + quarter;
    if (block < num_blocks)
      hash_units(lanes, quarter, [=](unsigned stripe) { return in[stripe * kQuarters]; }, [](unsigned, Unit) {});
    const uint64_t hash = finish_hash(lanes);
    if (block == num_blocks) return;
    if (hash != hashes[block]) {
      if (quarter == 0) atomicAdd(&wrong[block / chunk_blocks], 1ull);
      return;
    }
    const uint64_t byte = first_byte + block * kBlockBytes;
    size_t span = find_span(spans, num_spans, byte);
    if (unsigned char* const direct = full_block(spans, num_spans, span, byte)) {
      Unit* const out = reinterpret_cast<Unit*>(direct) + quarter;
#pragma unroll 8
      for (unsigned stripe = 0; stripe < kStripes; ++stripe) out[stripe * kQuarters] = in[stripe * kQuarters];
      return;
    }
    for (unsigned stripe = 0; stripe < kStripes; ++stripe) {
      const uint64_t here = byte + stripe * 64 + quarter * 16;
      const uint64_t bytes = bytes_here(spans, num_spans, span, here);
      if (bytes) store_bytes(spans[span].at + (here - spans[span].start), bytes, in[stripe * kQuarters]);
    }
  });
}

// ---- digests of units ----------------------------------------------------------------------------
// A *unit* is the bytes of some tensors, one after the other without gaps; its digest is their XXH3-64, for more than 240
// bytes. Between two kilobytes XXH3 scrambles its accumulators, so that a unit can only be hashed from its start on. But
// what a kilobyte adds to them does not depend on them. So the threads of a block compute that for 64 kilobytes at a time,
// and eight of them add it up, one for each accumulator, while the others load the next 64.
constexpr unsigned kAhead = kDigestThreads / kQuarters;  // kilobytes
constexpr unsigned kKilobyte = 1024, kStripe = 64;

// Loads 16 bytes of a unit, perhaps of several tensors.
__device__ inline Unit load_across(const Span* __restrict__ spans, size_t num_spans, size_t& span, uint64_t byte) {
  if (bytes_here(spans, num_spans, span, byte) >= 16) return load_bytes(spans[span].at + (byte - spans[span].start), 16);
  Unit unit = {0, 0};
  size_t at = span;
  for (unsigned i = 0; i < 16; ++i) {
    if (!bytes_here(spans, num_spans, at, byte + i)) break;
    const uint64_t value = spans[at].at[byte + i - spans[at].start];
    if (i < 8) unit.low |= value << 8 * i;
    else unit.high |= value << 8 * (i - 8);
  }
  return unit;
}

// Launch: 1-D grid of any size, blockDim.x kDigestThreads.
extern "C" __global__ __launch_bounds__(kDigestThreads) void digest_units(const Span* __restrict__ spans,  // of all units, with `start` in its unit  device
                                        const uint64_t* __restrict__ ends,  // [num_units] number of spans up to the end of each  device
                                        size_t num_units,
                                        uint64_t* __restrict__ digests) {   // [num_units]  device, written
  __shared__ uint64_t sums[2][kAhead][8];
  const unsigned quarter = threadIdx.x % kQuarters, ahead = threadIdx.x / kQuarters;
  Lanes lanes(quarter);
  for (size_t unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const size_t from = unit ? ends[unit - 1] : 0, num_spans = ends[unit] - from;
    const Span* const mine = spans + from;
    const uint64_t bytes = mine[num_spans - 1].start + mine[num_spans - 1].bytes;
    const uint64_t last = (bytes - 1) / kKilobyte;  // the number of the last kilobyte, which may be shorter
    uint64_t sum = threadIdx.x < 8 ? kStart[threadIdx.x] : 0;
    unsigned turn = 0;
    for (uint64_t first = 0; first <= last; first += kAhead, turn ^= 1) {
      const uint64_t kilobyte = first + ahead;
      lanes.low = lanes.high = 0;
      if (kilobyte <= last) {
        const uint64_t byte = kilobyte * kKilobyte + quarter * 16;
        size_t span = find_span(mine, num_spans, byte);
        if (kilobyte < last && mine[span].start + mine[span].bytes >= byte + kKilobyte) {
          const unsigned char* const at = mine[span].at + (byte - mine[span].start);
          Unit units[kAtOnce];
#pragma unroll
          for (unsigned half = 0; half < 16; half += kAtOnce) {
#pragma unroll
            for (unsigned i = 0; i < kAtOnce; ++i) units[i] = load_bytes(at + (half + i) * kStripe, 16);
#pragma unroll
            for (unsigned i = 0; i < kAtOnce; ++i) lanes.add(units[i], 8 * (half + i));
          }
        } else {
          const unsigned stripes = kilobyte < last ? 16 : static_cast<unsigned>((bytes - 1) % kKilobyte / kStripe);
          for (unsigned i = 0; i < stripes; ++i)
            lanes.add_stripe(load_across(mine, num_spans, span, byte + i * kStripe), quarter, i);
          // The very last stripe ends with the unit, and has its own position in the secret.
          const uint64_t end = bytes - kStripe + quarter * 16;
          span = find_span(mine, num_spans, end);
          if (kilobyte == last) lanes.add(load_across(mine, num_spans, span, end), 121);
        }
      }
      sums[turn][ahead][2 * quarter] = lanes.low;
      sums[turn][ahead][2 * quarter + 1] = lanes.high;
      __syncthreads();
      if (threadIdx.x < 8) {
        for (unsigned i = 0; i < kAhead && first + i <= last; ++i) {
          sum += sums[turn][i][threadIdx.x];
          if (first + i < last) sum = (sum ^ sum >> 47 ^ kSecret[16 + threadIdx.x]) * kPrime32_1;
        }
      }
    }
    if (threadIdx.x < 8) sums[turn][0][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < kWarp) {
      lanes.low = sums[turn][0][2 * quarter];
      lanes.high = sums[turn][0][2 * quarter + 1];
      const uint64_t digest = finish_hash(lanes, bytes);
      if (threadIdx.x == 0) digests[unit] = digest;
    }
    __syncthreads();
  }
}
