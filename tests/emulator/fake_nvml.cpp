// Stands in for libnvidia-ml.so.1: any UUID is a GPU, whose reports are lines of the file that EVERMOE_TEST_NVML names.
//
//     xid 79          an event, once for each line
//     recovery 1      the action that the driver demands
//     failed 1        a row could not be remapped; pending 1: one will be
//     errors 3        uncorrectable errors of memory since the driver was loaded
//     hot 1           the GPU is slowed down by heat
//     lost 1          NVML does not reach it
//
// Layouts and numbers are those of NVIDIA's nvml.h, as nvidia-ml-py has them.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int SUCCESS = 0, TIMEOUT = 10, GPU_IS_LOST = 15;
constexpr unsigned RECOVERY_ACTION = 230;
constexpr uint64_t XID_EVENT = 8, HW_THERMAL_SLOWDOWN = 0x40;

struct EventData {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  unsigned value_type;
  int result;
  union {
    unsigned u;
    unsigned long long ull;
  } value;
};

int gpu;
size_t told; // number of Xids that were events already

std::vector<unsigned> said(const char *what) {
  std::vector<unsigned> found;
  const char *path = getenv("EVERMOE_TEST_NVML");
  std::ifstream file(path ? path : "");
  std::string name;
  unsigned value;
  while (file >> name >> value)
    if (name == what)
      found.push_back(value);
  return found;
}

unsigned last(const char *what) {
  auto found = said(what);
  return found.empty() ? 0 : found.back();
}

int state() { return last("lost") ? GPU_IS_LOST : SUCCESS; }

} // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == GPU_IS_LOST ? "GPU is lost" : "another error"; }

int nvmlDeviceGetHandleByUUID(const char *, void **device) {
  *device = &gpu;
  return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
  *set = &told;
  return SUCCESS;
}

int nvmlEventSetFree(void *) { return SUCCESS; }
int nvmlDeviceRegisterEvents(void *, unsigned long long, void *) { return SUCCESS; }

int nvmlEventSetWait_v2(void *, EventData *data, unsigned milliseconds) {
  auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  do {
    auto xids = said("xid");
    if (xids.size() > told) {
      *data = {&gpu, XID_EVENT, xids[told++], ~0u, ~0u};
      return SUCCESS;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } while (std::chrono::steady_clock::now() < until);
  return TIMEOUT;
}

int nvmlDeviceGetFieldValues(void *, int count, FieldValue *values) {
  for (int at = 0; at < count; ++at) {
    values[at].result = values[at].field == RECOVERY_ACTION ? SUCCESS : 3;
    values[at].value.u = last("recovery");
  }
  return state();
}

int nvmlDeviceGetRemappedRows(void *, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *corrected = *uncorrected = 0;
  *pending = last("pending");
  *failed = last("failed");
  return state();
}

int nvmlDeviceGetTotalEccErrors(void *, int, int, unsigned long long *count) {
  *count = last("errors");
  return state();
}

int nvmlDeviceGetCurrentClocksEventReasons(void *, unsigned long long *reasons) {
  *reasons = last("hot") ? HW_THERMAL_SLOWDOWN : 0;
  return state();
}
}
