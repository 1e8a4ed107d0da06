// checks.cpp -- TEST ONLY. Finds races, accesses out of bounds, reads of memory that nobody wrote, and undefined
// behaviour. The kernels are compiled with -fsanitize=thread,undefined; the functions that this makes the compiler call
// are defined here, with the order of CUDA instead of that of C++: __syncthreads orders a block, __syncwarp the lanes of
// its mask, one launch the next, and nothing else orders anything; votes and shuffles are no memory barriers, and blocks
// of one launch are never ordered. Atomics do not race with each other.
//
// Each byte of a registered buffer has a cell: its last write and two more accesses. Accesses are numbered in the order
// in which they run, so that a number is a time, too. Example: thread 0 writes s[0] (access 7), both threads pass a
// barrier (from 8 on everything is ordered after it), thread 1 reads s[0]: 7 < 8, no race.
#include "emulator.h"
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace emulator {
namespace {
struct Access {
  uint32_t pc, block;
  uint16_t thread;
  bool write, atomic;
};
struct Cell { uint32_t write, others[2]; };  // numbers of accesses; 0: none
struct Region {
  uintptr_t begin, end;
  std::string what;
  bool shared, initialised;
  Cell* cells;
  Region(const void* place, size_t bytes, const char* name, bool is_shared, bool is_initialised)
      : begin(uintptr_t(place)), end(begin + bytes), what(name), shared(is_shared), initialised(is_initialised) {
    void* memory = mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cells = memory == MAP_FAILED ? nullptr : static_cast<Cell*>(memory);
  }
  ~Region() { munmap(cells, (end - begin) * sizeof(Cell)); }
};
constexpr uint32_t kFirst = 1, kRenumber = 1u << 31;
constexpr size_t kLanes = 32, kRecent = 4096;
std::vector<std::unique_ptr<Region>> regions;
std::vector<Access> accesses;               // of this launch; that of number n is accesses[n - launch_start]
uint32_t launch_start = kFirst;             // earlier accesses are of earlier launches
// What is known of the block in a slot.
struct Order {
  uint32_t block_start, barrier;            // earlier accesses are of earlier blocks in the slot, or ordered
  uint32_t ordered_before[1024][kLanes];    // [thread, lane]: the lane's accesses before this number are ordered
  uint32_t last_sync[1024];
  std::unique_ptr<Region> dynamic, fixed;   // its shared memory; that of fixed size is at the same place for all
};
std::vector<std::unique_ptr<Order>> slots;
Order* now;
size_t num_slots;
uintptr_t fixed_begin;
size_t fixed_bytes;
struct Recent { uint32_t pc, number, block; uint16_t thread; bool atomic; Region* region; };
Recent recent[kRecent];                     // by pc: its last access
uintptr_t image_begin, image_end, stack_begin, stack_end;  // stack_end is 0 while no kernel runs

uint32_t next_number() { return launch_start + uint32_t(accesses.size()); }
int find_image(dl_phdr_info* info, size_t, void*) {
  uintptr_t begin = ~uintptr_t(0), end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t first = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    begin = std::min(begin, first);
    end = std::max(end, first + info->dlpi_phdr[i].p_memsz);
  }
  const auto here = reinterpret_cast<uintptr_t>(&find_image);
  if (here < begin || here >= end) return 0;
  image_begin = begin;
  image_end = end;
  return 1;
}
// file:line of an access: the innermost one that is not in the stand-ins.
std::string source(uint32_t pc) {
  char text[4200], line[300];
  Dl_info info;
  snprintf(text, sizeof text, "code at %#x", pc);
  std::string found = text;
  if (!dladdr(reinterpret_cast<void*>(image_begin + pc), &info)) return found;
  snprintf(text, sizeof text, "addr2line -i -s -e '%s' %#x 2>/dev/null", info.dli_fname, pc - 1);
  FILE* const lines = popen(text, "r");
  bool searching = true;
  while (lines && fgets(line, sizeof line, lines)) {
    if (!searching || strstr(line, "cuda_on_cpu.h") || line[0] == '?') continue;
    line[strcspn(line, " \n")] = 0;
    found = line;
    searching = false;
  }
  if (lines) pclose(lines);
  return found;
}
const char* verb(const Access& access) {
  return access.atomic ? "changes atomically" : access.write ? "writes" : "reads";
}
[[noreturn]] void fail_outside(uintptr_t place, size_t size, const Access& access) {
  const Region* nearest = nullptr;
  const auto gap = [=](const Region& r) { return place < r.begin ? r.begin - place : place < r.end ? 0 : place - r.end; };
  for (const auto& r : regions)
    if (!nearest || gap(*r) < gap(*nearest)) nearest = r.get();
  for (const Region* r : {now->dynamic.get(), now->fixed.get()})
    if (r && (!nearest || gap(*r) < gap(*nearest))) nearest = r;
  const std::string here = source(access.pc);
  if (!nearest) fail("%s: out of bounds: %s %zu bytes, and there is no buffer at all", here.c_str(), verb(access), size);
  fail("%s: out of bounds: %s %zu bytes outside of every buffer; the nearest is %s of %zu bytes, at byte %td of it", here.c_str(),
       verb(access), size, nearest->what.c_str(), size_t(nearest->end - nearest->begin), ptrdiff_t(place - nearest->begin));
}
[[noreturn]] void fail_race(const Region& region, size_t byte, const Access& access, const Access& other) {
  fail("%s: race: %s byte %zu of %s, which thread %u of block %u %s at %s, with nothing to order the two", source(access.pc).c_str(),
       verb(access), byte, region.what.c_str(), other.thread, other.block, verb(other), source(other.pc).c_str());
}
Region& find(uintptr_t place, size_t size, const Access& access, Region* likely) {
  for (Region* r : {now->dynamic.get(), now->fixed.get()})
    if (r && place >= r->begin && place + size <= r->end) return *r;
  if (likely && place >= likely->begin && place + size <= likely->end) return *likely;
  for (const auto& r : regions)
    if (place >= r->begin && place + size <= r->end) return *r;
  fail_outside(place, size, access);
}
bool is_ordered(uint32_t number, const Region& region) {
  if (number < (region.shared ? now->block_start : launch_start)) return true;
  const Access& access = accesses[number - launch_start];
  if (access.block != blockIdx.x) return false;
  if (access.thread == threadIdx.x || number < now->barrier) return true;
  return access.thread / kLanes == threadIdx.x / kLanes && number < now->ordered_before[threadIdx.x][access.thread % kLanes];
}
// The number of an access: that of the same one before, if its thread has waited for nobody since.
uint32_t number_of(const Access& access, Recent& slot) {
  const uint32_t since = std::max(std::max(now->block_start, now->barrier), now->last_sync[access.thread]);
  const bool same = slot.pc == access.pc && slot.thread == access.thread && slot.block == access.block && slot.atomic == access.atomic;
  if (same && slot.number >= since) return slot.number;
  slot.number = next_number();
  slot.pc = access.pc;
  slot.thread = access.thread;
  slot.block = access.block;
  slot.atomic = access.atomic;
  accesses.push_back(access);
  return slot.number;
}
// Ends the launch if the access may not follow those of the cell.
void check_byte(const Region& region, size_t byte, const Access& access, const Cell& cell) {
  const bool unwritten = region.shared ? cell.write < now->block_start : !region.initialised && cell.write == 0;
  if (unwritten && (!access.write || access.atomic))
    fail("%s: uninitialised: %s byte %zu of %s, which nobody has written", source(access.pc).c_str(), verb(access), byte, region.what.c_str());
  for (const uint32_t number : {cell.write, cell.others[0], cell.others[1]}) {
    if (is_ordered(number, region)) continue;
    const Access& other = accesses[number - launch_start];
    if ((access.write || other.write) && !(access.atomic && other.atomic)) fail_race(region, byte, access, other);
  }
}
void keep(Cell& cell, uint32_t number, const Region& region) {
  if (cell.others[0] == number) return;
  cell.others[is_ordered(cell.others[0], region) ? 0 : 1] = number;
}
void note(Cell& cell, uint32_t number, const Access& access, const Region& region) {
  if (!access.write) return keep(cell, number, region);
  if (access.atomic && !is_ordered(cell.write, region)) keep(cell, cell.write, region);
  cell.write = number;
}
void check(uintptr_t place, size_t size, bool write, bool atomic, uintptr_t return_address) {
  if (!stack_end || (place >= stack_begin && place < stack_end)) return;  // no kernel runs, or its own locals
  if (!write && place >= image_begin && place < image_end) return;        // constants, threadIdx
  const Access access{uint32_t(return_address - image_begin), blockIdx.x, uint16_t(threadIdx.x), write, atomic};
  Recent& slot = recent[access.pc % kRecent];
  Region& region = find(place, size, access, slot.region);
  slot.region = region.shared ? nullptr : &region;
  const uint32_t number = number_of(access, slot);
  const size_t first = place - region.begin;
  Cell before{}, after{};
  for (size_t byte = first; byte < first + size; ++byte) {
    Cell& cell = region.cells[byte];
    if (byte == first || memcmp(&cell, &before, sizeof cell)) {  // mostly the bytes of one access have the same history
      before = after = cell;
      check_byte(region, byte, access, before);
      note(after, number, access, region);
    }
    cell = after;
  }
}
// Numbers are used up: what was written stays so.
void renumber() {
  for (const auto& region : regions)
    for (size_t byte = 0; byte < region->end - region->begin; ++byte) region->cells[byte] = {region->cells[byte].write ? kFirst : 0u, {0, 0}};
  launch_start = kFirst + 1;
}
}  // namespace

void check_launch(const void* fixed, size_t bytes) {
  if (!image_end) dl_iterate_phdr(find_image, nullptr);
  launch_start = next_number() + 1;
  accesses.clear();
  if (launch_start > kRenumber) renumber();
  memset(recent, 0, sizeof recent);
  num_slots = 0;
  fixed_begin = uintptr_t(fixed);
  fixed_bytes = bytes;
}
void check_shared(const void* dynamic, size_t bytes) {
  if (slots.size() == num_slots) slots.emplace_back(new Order());
  Order& slot = *slots[num_slots++];
  slot.block_start = slot.barrier = launch_start;
  if (bytes) slot.dynamic.reset(new Region(dynamic, bytes, "dynamic shared memory", true, false));
  if (fixed_bytes) slot.fixed.reset(new Region(reinterpret_cast<void*>(fixed_begin), fixed_bytes, "static shared memory", true, false));
}
void check_slot(unsigned number) { now = slots[number].get(); }
void check_end() {
  stack_begin = stack_end = 0;
  for (auto& slot : slots) {
    slot->dynamic.reset();
    slot->fixed.reset();
  }
}
void check_block() {
  accesses.push_back({});  // takes a number, so that nothing is as old as the start
  now->block_start = now->barrier = next_number();
}
void check_thread(const void* stack, size_t bytes) {
  stack_begin = uintptr_t(stack);
  stack_end = stack_begin + bytes;
}
void check_sync_block() { now->barrier = next_number(); }
void check_sync_warp(unsigned warp, unsigned mask) {
  const uint32_t number = next_number();
  auto& ordered_before = now->ordered_before;
  for (unsigned other = 0; other < kLanes; ++other) {
    uint32_t bound = mask >> other & 1 ? number : 0;
    for (unsigned lane = 0; lane < kLanes; ++lane)
      if (mask >> lane & 1) bound = std::max(bound, ordered_before[warp * kLanes + lane][other]);
    for (unsigned lane = 0; lane < kLanes; ++lane)
      if (mask >> lane & 1) ordered_before[warp * kLanes + lane][other] = bound;
  }
  for (unsigned lane = 0; lane < kLanes; ++lane)
    if (mask >> lane & 1) now->last_sync[warp * kLanes + lane] = number;
}
void check_atomic(const void* place, size_t size, void* pc) { check(uintptr_t(place), size, true, true, uintptr_t(pc)); }
}  // namespace emulator

using emulator::Region;
using emulator::regions;
// Memory that kernels may use. Null, or what is wrong.
extern "C" const char* emulated_register(const void* place, size_t bytes, const char* what, int initialised) {
  const auto begin = uintptr_t(place), end = begin + bytes;
  for (const auto& r : regions) {
    if (begin >= r->begin && end <= r->end) return nullptr;
    if (begin < r->end && end > r->begin) return "overlaps with a registered buffer";
  }
  regions.emplace_back(new Region(place, bytes, what, false, initialised));
  return regions.back()->cells ? nullptr : "no address space for its shadow";
}
extern "C" void emulated_forget(const void* place) {
  const auto is_it = [=](const auto& r) { return r->begin == uintptr_t(place); };
  regions.erase(std::remove_if(regions.begin(), regions.end(), is_it), regions.end());
}

// ---- what the compiler calls -------------------------------------------------------------------------
#define PC uintptr_t(__builtin_return_address(0))
#define EVERMOE_ACCESS(name, size)                                                                                  \
  extern "C" void __tsan_read##name(void* place) { emulator::check(uintptr_t(place), size, false, false, PC); } \
  extern "C" void __tsan_write##name(void* place) { emulator::check(uintptr_t(place), size, true, false, PC); }
EVERMOE_ACCESS(1, 1)
EVERMOE_ACCESS(2, 2)
EVERMOE_ACCESS(4, 4)
EVERMOE_ACCESS(8, 8)
EVERMOE_ACCESS(16, 16)
#define EVERMOE_UNALIGNED(size)                                                                                               \
  extern "C" void __tsan_unaligned_read##size(void* place) { emulator::check(uintptr_t(place), size, false, false, PC); } \
  extern "C" void __tsan_unaligned_write##size(void* place) { emulator::check(uintptr_t(place), size, true, false, PC); }
EVERMOE_UNALIGNED(2)
EVERMOE_UNALIGNED(4)
EVERMOE_UNALIGNED(8)
EVERMOE_UNALIGNED(16)
extern "C" void __tsan_read_range(void* place, size_t size) { emulator::check(uintptr_t(place), size, false, false, PC); }
extern "C" void __tsan_write_range(void* place, size_t size) { emulator::check(uintptr_t(place), size, true, false, PC); }
extern "C" void __tsan_init() {}

// Every report of -fsanitize=undefined starts with where.
struct Site { const char* file; uint32_t line, column; };
[[noreturn]] static void undefined(const Site* site, const char* what) {
  const char* const slash = strrchr(site->file, '/');
  emulator::fail("%s:%u: undefined: %s", slash ? slash + 1 : site->file, site->line, what);
}
#define EVERMOE_UNDEFINED(name, what) \
  extern "C" void __ubsan_handle_##name(const Site* site) { undefined(site, what); }
EVERMOE_UNDEFINED(add_overflow, "a signed sum overflows")
EVERMOE_UNDEFINED(sub_overflow, "a signed difference overflows")
EVERMOE_UNDEFINED(mul_overflow, "a signed product overflows")
EVERMOE_UNDEFINED(negate_overflow, "a negation overflows")
EVERMOE_UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
EVERMOE_UNDEFINED(shift_out_of_bounds, "a shift by more than the bits there are")
EVERMOE_UNDEFINED(out_of_bounds, "an index past the end of an array")
EVERMOE_UNDEFINED(pointer_overflow, "a pointer overflows")
EVERMOE_UNDEFINED(load_invalid_value, "a load of a value that the type does not have")
EVERMOE_UNDEFINED(vla_bound_not_positive, "an array of no elements")
EVERMOE_UNDEFINED(nonnull_arg, "null where it must not be")
EVERMOE_UNDEFINED(builtin_unreachable, "code that was said never to run")
EVERMOE_UNDEFINED(missing_return, "no value returned")
EVERMOE_UNDEFINED(invalid_builtin, "a count of leading or trailing zeros of 0")
struct TypeSite { Site site; const void* type; unsigned char log_alignment, kind; };
extern "C" void __ubsan_handle_type_mismatch_v1(const TypeSite* at, uintptr_t place) {
  const size_t alignment = size_t(1) << at->log_alignment;
  if (!place) undefined(&at->site, "an access through null");
  if (place % alignment == 0) undefined(&at->site, "an access past the end of its object");
  emulator::fail("%s:%u: misaligned: an access to address %#zx, which needs an alignment of %zu bytes",
                 strrchr(at->site.file, '/') ? strrchr(at->site.file, '/') + 1 : at->site.file, at->site.line, size_t(place), alignment);
}
