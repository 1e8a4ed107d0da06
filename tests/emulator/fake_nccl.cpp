// fake_nccl.cpp -- TEST ONLY. As much of libnccl.so as torch's ProcessGroupNCCL and src/nccl call, between processes of one
// machine, on top of fake_driver.cpp. A collective is work of a stream: it reads its input when the stream reaches it, and
// completes once all its output has arrived. As within a machine, the end of a rank is not noticed: a peer that waits for it
// waits until its own communicator is aborted, and its output becomes garbage. With EVERMOE_TEST_NCCL=reports the communicator
// reports the loss, as between machines. Ranks with different calls end with a message, where NCCL might hang.
//
// It is as stubborn as NCCL 2.28.9:
// - the first collective and the first message between two ranks connect them, which holds up whoever launches until the
//   other one launches, too (group.cc, groupLaunch); a communicator that does not block has a thread for each launch
//   (ncclGroupEndInternal), and takes no call until that has ended (ncclCommEnsureReady);
// - an abort sets its flags, and then waits: for the launching thread, until all streams have passed the communicator's
//   operations, and while a CUDA graph has some (init.cc, commDestroySync);
// - an abort while another thread calls NCCL with a communicator that does not block ends the process, as NCCL may crash then;
// - without cuMem (NCCL_CUMEM_ENABLE=0), memory that a rank frees is gone for the operations of others: the process ends.
//
// Example: ranks 0 and 1 sum [1, 2] and [10, 20]. Each sends its two numbers to the other, and adds both in the order of
// the ranks: [11, 22], the same bits on both.
#include "fake_driver.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <utility>
#include <vector>

extern "C" int cuCtxGetCurrent(void** context);
extern "C" int cuCtxSetCurrent(void* context);

namespace {
enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7 };
enum Reduction { kSum, kProduct, kMax, kMin, kAverage };
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBfloat16, kFp8E4M3, kFp8E5M2 };
constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
constexpr useconds_t kPause = 2000;  // microseconds between two tries to connect
using Bytes = std::vector<char>;

// What stands before the bytes of a message, so that ranks that call different things notice.
struct Header { uint64_t call, bytes; };
struct Peer {
  int socket = -1, control = -1;
  bool has_asked[2] = {}, is_connected[2] = {};  // for collectives, and for messages
  Bytes to_send, received;
  bool is_gone = false;
};
struct Communicator {
  int rank = 0, size = 1;
  std::string name;
  std::vector<Peer> peers;
  void* context = nullptr;
  std::atomic<int> state{kInProgress};
  std::atomic<int> calls{0};  // of the user's threads, under way
  std::atomic<bool> is_aborted{false}, is_freed{false};
  bool is_blocking = true;
  std::thread launching;
  std::shared_ptr<int> used = std::make_shared<int>();  // by each operation in a stream or in a graph
  void free_memory() {
    for (const Peer& peer : peers) {
      if (peer.control >= 0) send(peer.control, "freed", 5, MSG_NOSIGNAL | MSG_DONTWAIT), close(peer.control);
      if (peer.socket >= 0) close(peer.socket);
    }
    is_freed = true;
  }
};
using Shared = std::shared_ptr<Communicator>;
[[noreturn]] void end_process(const Communicator& comm, const char* what) {
  fprintf(stderr, "fake_nccl: rank %d: %s\n", comm.rank, what);
  abort();
}
// A call of the user's with a communicator.
struct Using {
  Communicator& comm;
  explicit Using(const Shared* handle) : comm(**handle) {
    ++comm.calls;
    if (comm.is_freed) end_process(comm, "a call with a communicator that was freed");
  }
  ~Using() {
    static std::atomic<unsigned> number{0};
    if (!comm.is_blocking && ++number % 64 == 0) usleep(5000);  // long enough for an abort to come upon it
    --comm.calls;
  }
};

// ---- connections: each rank listens under a name of its own, and connects to those before it ---------------------
sockaddr_un address_of(const std::string& name, int rank, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const int written = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "evermoe-nccl-%s-%d", name.c_str(), rank);
  length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(written));
  return address;
}
bool transfer_all(Communicator& comm, int socket, void* data, size_t bytes, bool sends) {
  for (char* at = static_cast<char*>(data); bytes;) {
    const ssize_t moved = sends ? send(socket, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket, at, bytes, MSG_DONTWAIT);
    if (comm.is_aborted || moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (moved < 0) usleep(kPause);
    else at += moved, bytes -= size_t(moved);
  }
  return true;
}
// Waits for all ranks, for ever or until it is aborted, as NCCL does.
void connect_all(const Shared& comm) {
  socklen_t length;
  const sockaddr_un own = address_of(comm->name, comm->rank, length);
  const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (bind(listening, reinterpret_cast<const sockaddr*>(&own), length) || listen(listening, comm->size)) {
    comm->state = kInvalidUsage;
    close(listening);
    return;
  }
  // Two connections to each: one for data, and one for what the launching threads tell each other.
  for (int each = 0; each < 2 * comm->rank && !comm->is_aborted;) {
    Peer& peer = comm->peers[size_t(each / 2)];
    const sockaddr_un other = address_of(comm->name, each / 2, length);
    const int tried = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(tried, reinterpret_cast<const sockaddr*>(&other), length) == 0 && transfer_all(*comm, tried, &comm->rank, sizeof comm->rank, true))
      (each++ % 2 ? peer.control : peer.socket) = tried;
    else close(tried), usleep(kPause);
  }
  for (int left = 2 * (comm->size - 1 - comm->rank); left && !comm->is_aborted;) {
    const int came = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    int rank = 0;
    if (came < 0) usleep(kPause);
    else if (transfer_all(*comm, came, &rank, sizeof rank, false)) {
      Peer& peer = comm->peers[size_t(rank)];
      (peer.socket < 0 ? peer.socket : peer.control) = came, --left;
    } else close(came);
  }
  close(listening);
  if (!comm->is_aborted) comm->state = kSuccess;
}

// ---- messages ----------------------------------------------------------------------------------------------
void move(Communicator& comm, Peer& peer) {
  if (peer.socket < 0) {  // this rank itself
    peer.received.insert(peer.received.end(), peer.to_send.begin(), peer.to_send.end());
    peer.to_send.clear();
    return;
  }
  while (!peer.is_gone && !peer.to_send.empty()) {
    const ssize_t sent = send(peer.socket, peer.to_send.data(), peer.to_send.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (sent < 0) peer.is_gone = true;
    else peer.to_send.erase(peer.to_send.begin(), peer.to_send.begin() + sent);
  }
  for (char block[1 << 16]; !peer.is_gone;) {
    const ssize_t came = recv(peer.socket, block, sizeof block, MSG_DONTWAIT);
    if (came < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (came <= 0) peer.is_gone = true;
    else peer.received.insert(peer.received.end(), block, block + came);
  }
  static const char* const way = getenv("EVERMOE_TEST_NCCL");
  int usual = kSuccess;
  if (peer.is_gone && way && !strcmp(way, "reports")) comm.state.compare_exchange_strong(usual, kRemoteError);
  static const char* const memory = getenv("NCCL_CUMEM_ENABLE");
  char told;
  if (peer.is_gone && !comm.is_aborted && memory && !strcmp(memory, "0") && recv(peer.control, &told, 1, MSG_DONTWAIT) == 1)
    end_process(comm, "an illegal memory access: a peer has freed what an operation still uses");
}
// Whether the message is there; then it is taken.
bool take(Communicator& comm, Peer& peer, Header expected, Bytes& into) {
  move(comm, peer);
  if (peer.received.size() < sizeof(Header)) return false;
  Header header;
  memcpy(&header, peer.received.data(), sizeof header);
  if (header.call != expected.call || header.bytes != expected.bytes) {
    fprintf(stderr, "fake_nccl: rank %d expected call %llu of %llu bytes, got call %llu of %llu\n", comm.rank,
            (unsigned long long)expected.call, (unsigned long long)expected.bytes, (unsigned long long)header.call,
            (unsigned long long)header.bytes);
    abort();
  }
  if (peer.received.size() < sizeof header + header.bytes) return false;
  const auto begin = peer.received.begin() + sizeof header;
  into.assign(begin, begin + ptrdiff_t(header.bytes));
  peer.received.erase(peer.received.begin(), begin + ptrdiff_t(header.bytes));
  return true;
}

// ---- calls -------------------------------------------------------------------------------------------------
enum Call : uint64_t { kAllReduce, kAllGather, kBroadcast, kReduce, kReduceScatter, kAllToAll, kPoint };
struct Sent { int peer; const void* from; size_t bytes; };
struct Received { int peer; size_t bytes; Bytes data = {}; bool is_there = false; };
// One call, from when its stream comes to it.
struct Operation {
  Call call;
  std::vector<Sent> sends;
  const void* own = nullptr;  // what this rank brings itself
  size_t own_bytes = 0;
  std::vector<Received> receives;
  std::function<void(const Bytes& own, const std::vector<Received>&)> finish;
  void* output = nullptr;
  size_t output_bytes = 0;
  Bytes own_data = {};
};
using Operations = std::vector<Operation>;

void begin(Communicator& comm, Operations& operations) {
  for (Operation& each : operations) {
    const auto* const own = static_cast<const char*>(each.own);
    each.own_data.assign(own, own + each.own_bytes);
    for (const Sent& sent : each.sends) {
      const Header header{each.call, sent.bytes};
      const auto *const head = reinterpret_cast<const char*>(&header), *const from = static_cast<const char*>(sent.from);
      Bytes& queue = comm.peers[size_t(sent.peer)].to_send;
      queue.insert(queue.end(), head, head + sizeof header);
      queue.insert(queue.end(), from, from + sent.bytes);
    }
  }
}
bool is_over(Communicator& comm, Operations& operations) {
  bool over = true;
  for (Operation& each : operations) {
    for (Received& received : each.receives) {
      if (!received.is_there)
        received.is_there = take(comm, comm.peers[size_t(received.peer)], {each.call, received.bytes}, received.data);
      over = over && received.is_there;
    }
    for (const Sent& sent : each.sends) {
      Peer& peer = comm.peers[size_t(sent.peer)];
      move(comm, peer);
      over = over && peer.to_send.empty();
    }
  }
  return over;
}
// What an aborted operation leaves: small integers, of which a pair looks like a large one, or any bits.
void spoil(const Operation& operation) {
  static std::mt19937 random(7);
  const bool small = random() % 2;
  for (size_t at = 0; at + 4 <= operation.output_bytes; at += 4) {
    const uint32_t bits = uint32_t(random()) & (small ? 0x3fff : 0xffffffff);
    memcpy(static_cast<char*>(operation.output) + at, &bits, sizeof bits);
  }
}
int enqueue(const Shared& comm, void* stream, Operations given) {
  return fake_driver_wait_on_stream(stream, [comm, given = std::move(given), used = comm->used] {
    const auto operations = std::make_shared<Operations>(given);
    const auto begun = std::make_shared<bool>(false);
    const auto ready = [=] {
      if (comm->is_aborted) return true;
      if (!std::exchange(*begun, true)) begin(*comm, *operations);
      return is_over(*comm, *operations);
    };
    return Collective{ready, [=, held = used] {
      for (const Operation& each : *operations) comm->is_aborted ? spoil(each) : each.finish(each.own_data, each.receives);
      return 0;
    }};
  }) ? kInvalidUsage : kSuccess;
}
using Works = std::map<void*, Operations>;  // by stream
// Each peer waits until the other one launches, too.
bool connect_peers(Communicator& comm, const Works& works) {
  char word = 'c';
  for (const bool sends : {true, false})
    for (const auto& [stream, operations] : works)
      for (const Operation& each : operations) {
        const bool kind = each.call == kPoint;
        std::vector<int> ranks;
        for (const Sent& sent : each.sends) ranks.push_back(sent.peer);
        for (const Received& received : each.receives) ranks.push_back(received.peer);
        for (const int rank : ranks) {
          Peer& peer = comm.peers[size_t(rank)];
          bool& done = peer.is_connected[kind];
          if (rank == comm.rank || done) continue;
          bool& asked = peer.has_asked[kind];
          if (sends && !std::exchange(asked, true)) transfer_all(comm, peer.control, &word, 1, true);
          if (!sends && transfer_all(comm, peer.control, &word, 1, false)) done = true;
          while (!sends && !done && !comm.is_aborted) usleep(kPause);  // for one that has ended
          if (comm.is_aborted) return false;
        }
      }
  return true;
}
// Launches what a thread has called for one communicator, in a thread of its own if that does not block.
int launch(const Shared& comm, const Works& works) {
  const auto run = [=] {
    if (!connect_peers(*comm, works)) return int(kInvalidUsage);
    for (const auto& [stream, operations] : works)
      if (const int error = enqueue(comm, stream, operations)) return error;
    return int(kSuccess);
  };
  if (comm->is_blocking) return run();
  if (comm->launching.joinable()) comm->launching.join();
  comm->state = kInProgress;
  comm->launching = std::thread([=, &state = comm->state] {
    cuCtxSetCurrent(comm->context);
    state = run();
  });
  return kInProgress;
}

// What a thread has called since ncclGroupStart. Thread-local memory of the library is the kernels' shared memory.
struct Group {
  int depth = 0;
  std::vector<std::tuple<Shared, void*, Operation>> calls;
};
Group& group() {
  static std::mutex hold;
  static std::map<std::thread::id, Group> groups;
  const std::lock_guard<std::mutex> held(hold);
  return groups[std::this_thread::get_id()];
}
int call(const Shared* handle, void* stream, Operation operation) {
  if (!handle) return kInvalidUsage;
  const Using use(handle);
  if ((*handle)->state == kInProgress) return kInvalidArgument;  // "before the previous operation returned ncclSuccess"
  if ((*handle)->state != kSuccess) return kInvalidUsage;
  if (group().depth == 0) return launch(*handle, {{stream, {std::move(operation)}}});
  group().calls.emplace_back(*handle, stream, std::move(operation));
  return kSuccess;
}

// ---- numbers -----------------------------------------------------------------------------------------------
float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, sizeof value); return value; }
uint32_t to_bits(float value) { uint32_t bits; memcpy(&bits, &value, sizeof bits); return bits; }
struct Half { _Float16 value; operator float() const { return float(value); } Half(float f) : value(_Float16(f)) {} };
struct Bfloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
  Bfloat16(float f) : bits(f != f ? 0x7fc0 : uint16_t((to_bits(f) + 0x7fff + (to_bits(f) >> 16 & 1)) >> 16)) {}
};
template <class T, class Wide>
void reduce_as(const std::vector<const char*>& from, char* to, size_t count, int how) {
  for (size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (size_t rank = 0; rank < from.size(); ++rank) {
      T read(0);
      memcpy(&read, from[rank] + i * sizeof read, sizeof read);
      const Wide value = Wide(read);
      if (rank == 0) sum = value;
      else sum = how == kProduct ? sum * value : how == kMax ? std::max(sum, value) : how == kMin ? std::min(sum, value) : sum + value;
    }
    if (how == kAverage) sum = sum / Wide(from.size());
    const T written = T(sum);
    memcpy(to + i * sizeof written, &written, sizeof written);
  }
}
int reduce(const std::vector<const char*>& from, char* to, size_t count, int type, int how) {
  switch (type) {
    case kInt8: return reduce_as<int8_t, int64_t>(from, to, count, how), 0;
    case kUint8: return reduce_as<uint8_t, uint64_t>(from, to, count, how), 0;
    case kInt32: return reduce_as<int32_t, int64_t>(from, to, count, how), 0;
    case kUint32: return reduce_as<uint32_t, uint64_t>(from, to, count, how), 0;
    case kInt64: return reduce_as<int64_t, int64_t>(from, to, count, how), 0;
    case kUint64: return reduce_as<uint64_t, uint64_t>(from, to, count, how), 0;
    case kHalf: return reduce_as<Half, float>(from, to, count, how), 0;
    case kFloat: return reduce_as<float, float>(from, to, count, how), 0;
    case kDouble: return reduce_as<double, double>(from, to, count, how), 0;
    case kBfloat16: return reduce_as<Bfloat16, float>(from, to, count, how), 0;
    default: return 1;
  }
}
// What all ranks have brought, in the order of the ranks.
std::vector<const char*> by_rank(int rank, const Bytes& own, const std::vector<Received>& received) {
  std::vector<const char*> found;
  for (const Received& each : received) found.push_back(each.data.data());
  found.insert(found.begin() + rank, own.data());
  return found;
}
bool can_reduce(int type, int how) { return type <= kBfloat16 && how <= kAverage; }
// To and from all others, `bytes` each: the `stride`-th bytes of `from` for each, or the same for all.
Operation with_all(const Communicator& comm, Call name, const void* from, size_t bytes, size_t stride) {
  Operation made{name, {}, static_cast<const char*>(from) + size_t(comm.rank) * stride, bytes, {}, {}};
  for (int peer = 0; peer < comm.size; ++peer) {
    if (peer == comm.rank) continue;
    made.sends.push_back({peer, static_cast<const char*>(from) + size_t(peer) * stride, bytes});
    made.receives.push_back({peer, bytes});
  }
  return made;
}
// Each rank's part comes to its place.
void gather(Operation& operation, int rank, void* to, size_t bytes) {
  operation.output = to, operation.output_bytes = bytes * (operation.receives.size() + 1);
  operation.finish = [=](const Bytes& own, const std::vector<Received>& received) {
    const auto parts = by_rank(rank, own, received);
    for (size_t each = 0; each < parts.size(); ++each) memcpy(static_cast<char*>(to) + each * bytes, parts[each], bytes);
  };
}
}  // namespace

extern "C" {
using Handle = Shared*;
struct UniqueId { char bytes[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };

int ncclGetVersion(int* version) { *version = 22809; return kSuccess; }
const char* ncclGetErrorString(int) { return "an error of the stand-in of NCCL"; }
const char* ncclGetLastError(Handle) { return "see the message of fake_nccl"; }
int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%08x%08x", random(), random());
  return kSuccess;
}

// ---- communicators -----------------------------------------------------------------------------------------
int ncclCommInitRankConfig(Handle* handle, int size, UniqueId id, int rank, const Config* config) {
  if (rank < 0 || rank >= size) return kInvalidArgument;
  const Shared comm = std::make_shared<Communicator>();
  cuCtxGetCurrent(&comm->context);
  comm->rank = rank, comm->size = size, comm->name = id.bytes;
  comm->peers.resize(size_t(size));
  comm->is_blocking = !config || config->blocking != 0;
  *handle = new Shared(comm);
  if (!comm->is_blocking) return comm->launching = std::thread(connect_all, comm), kInProgress;
  connect_all(comm);
  return comm->state;
}
int ncclCommInitRank(Handle* handle, int size, UniqueId id, int rank) { return ncclCommInitRankConfig(handle, size, id, rank, nullptr); }
int ncclCommInitRankScalable(Handle* handle, int size, int rank, int, const UniqueId* ids, const Config* config) {
  return ncclCommInitRankConfig(handle, size, *ids, rank, config);
}
int ncclCommGetAsyncError(Handle handle, int* error) {
  if (!handle) return kInvalidArgument;
  const Using use(handle);
  *error = (*handle)->state;
  return kSuccess;
}
int ncclCommCount(Handle handle, int* count) { *count = (*handle)->size; return kSuccess; }
int ncclCommUserRank(Handle handle, int* rank) { *rank = (*handle)->rank; return kSuccess; }
// What waits in a stream ends; others are not told. Torch aborts a communicator twice, the second time as a null.
int ncclCommAbort(Handle handle) {
  if (!handle) return kSuccess;
  Communicator& comm = **handle;
  if (comm.calls && !comm.is_blocking) end_process(comm, "an abort while another thread calls NCCL");
  comm.is_aborted = true;
  while (comm.calls) usleep(kPause);
  if (comm.launching.joinable()) comm.launching.join();
  void* context;
  cuCtxGetCurrent(&context);
  cuCtxSetCurrent(comm.context);
  while (comm.used.use_count() > 1) usleep(kPause / 10);  // streams and graphs
  cuCtxSetCurrent(context);
  comm.free_memory();
  return kSuccess;  // the handle itself stays, to find calls with it
}
int ncclCommFinalize(Handle) { return kSuccess; }
int ncclCommDestroy(Handle handle) { return ncclCommAbort(handle); }

int ncclGroupStart() { ++group().depth; return kSuccess; }
int ncclGroupEnd() {
  Group& mine = group();
  if (--mine.depth) return kSuccess;
  std::map<Shared, Works> works;
  for (auto& [comm, stream, operation] : std::exchange(mine.calls, {})) works[comm][stream].push_back(std::move(operation));
  int result = kSuccess;
  for (auto& [comm, of_comm] : works) {
    const Using use(&comm);
    if (const int status = launch(comm, of_comm)) result = status;
  }
  return result;
}
// Not in this stand-in.
int ncclCommSplit() { return kInvalidUsage; }
int ncclCommShrink() { return kInvalidUsage; }
int ncclCommInitAll() { return kInvalidUsage; }
int ncclCommRegister() { return kInvalidUsage; }
int ncclCommDeregister() { return kInvalidUsage; }
int ncclCommWindowRegister() { return kInvalidUsage; }
int ncclCommWindowDeregister() { return kInvalidUsage; }
int ncclRedOpCreatePreMulSum() { return kInvalidUsage; }
int ncclRedOpDestroy() { return kInvalidUsage; }

// ---- collectives -------------------------------------------------------------------------------------------
int ncclAllReduce(const void* from, void* to, size_t count, int type, int how, Handle comm, void* stream) {
  if (!can_reduce(type, how)) return kInvalidUsage;
  Operation made = with_all(**comm, kAllReduce, from, count * kBytes[type], 0);
  made.output = to, made.output_bytes = count * kBytes[type];
  made.finish = [=, rank = (*comm)->rank](const Bytes& own, const std::vector<Received>& received) {
    reduce(by_rank(rank, own, received), static_cast<char*>(to), count, type, how);
  };
  return call(comm, stream, std::move(made));
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int how, Handle comm, void* stream) {
  if (!can_reduce(type, how)) return kInvalidUsage;
  Operation made = with_all(**comm, kReduceScatter, from, count * kBytes[type], count * kBytes[type]);
  made.output = to, made.output_bytes = count * kBytes[type];
  made.finish = [=, rank = (*comm)->rank](const Bytes& own, const std::vector<Received>& received) {
    reduce(by_rank(rank, own, received), static_cast<char*>(to), count, type, how);
  };
  return call(comm, stream, std::move(made));
}
int ncclReduce(const void* from, void* to, size_t count, int type, int how, int root, Handle comm, void* stream) {
  if (!can_reduce(type, how)) return kInvalidUsage;
  Operation made = with_all(**comm, kReduce, from, count * kBytes[type], 0);
  const bool is_root = (*comm)->rank == root;
  if (is_root) made.sends.clear();
  else {
    made.receives.clear();
    made.sends = {{root, from, count * kBytes[type]}};
  }
  made.finish = [=, rank = (*comm)->rank](const Bytes& own, const std::vector<Received>& received) {
    if (is_root) reduce(by_rank(rank, own, received), static_cast<char*>(to), count, type, how);
  };
  return call(comm, stream, std::move(made));
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Handle comm, void* stream) {
  Operation made = with_all(**comm, kAllGather, from, count * kBytes[type], 0);
  gather(made, (*comm)->rank, to, count * kBytes[type]);
  return call(comm, stream, std::move(made));
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, Handle comm, void* stream) {
  Operation made = with_all(**comm, kAllToAll, from, count * kBytes[type], count * kBytes[type]);
  gather(made, (*comm)->rank, to, count * kBytes[type]);
  return call(comm, stream, std::move(made));
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Handle comm, void* stream) {
  Operation made{kBroadcast, {}, from, count * kBytes[type], {}, {}};
  if ((*comm)->rank == root) made.sends = with_all(**comm, kBroadcast, from, count * kBytes[type], 0).sends;
  else made.receives = {{root, count * kBytes[type]}}, made.own_bytes = 0;
  made.finish = [=](const Bytes& own, const std::vector<Received>& received) {
    const Bytes& data = received.empty() ? own : received[0].data;
    memcpy(to, data.data(), data.size());
  };
  return call(comm, stream, std::move(made));
}
int ncclBcast(void* data, size_t count, int type, int root, Handle comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
int ncclSend(const void* from, size_t count, int type, int peer, Handle comm, void* stream) {
  return call(comm, stream, {kPoint, {{peer, from, count * kBytes[type]}}, nullptr, 0, {}, [](const Bytes&, const std::vector<Received>&) {}, nullptr, 0});
}
int ncclRecv(void* to, size_t count, int type, int peer, Handle comm, void* stream) {
  const auto finish = [=](const Bytes&, const std::vector<Received>& received) { memcpy(to, received[0].data.data(), received[0].bytes); };
  return call(comm, stream, {kPoint, {}, nullptr, 0, {{peer, count * kBytes[type]}}, finish, to, count * kBytes[type]});
}
}
