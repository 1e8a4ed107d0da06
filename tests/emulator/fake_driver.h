// fake_driver.h -- TEST ONLY. What fake_nccl.cpp asks of fake_driver.cpp: work of a stream that waits for other processes.
#pragma once
#include <functional>

// The work waits at the front of its stream until `ready` says that it may run.
struct Collective {
  std::function<bool()> ready;
  std::function<int()> work;
};
// Called for each run: a graph has several.
using Making = std::function<Collective()>;

int fake_driver_wait_on_stream(void* stream, const Making& make);
