# Builds the kernels for the CPU:  make -f build.mk OUT=folder [KERNELS=folder] [CHECKED=1] [DRIVER=1]
# OUT/kernels.so, with CHECKED=1 one that finds races and the like; with DRIVER=1 OUT/libcuda.so, the stand-in driver
# and, for a process that preloads it, the stand-ins of CUDA's runtime and NCCL.
# Each .cu is built with a list of its kernels behind it, found by the marks that cuda_on_cpu.h leaves for __global__.
HERE := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
KERNELS ?= $(HERE)../../kernels
SOURCES := $(wildcard $(abspath $(KERNELS))/*.cu)
PARTS := emulator $(if $(CHECKED),checks) $(if $(DRIVER),fake_driver fake_nccl fake_runtime streams)
LIBRARY := $(OUT)/$(if $(DRIVER),libcuda.so,kernels.so)
OBJECTS := $(SOURCES:$(abspath $(KERNELS))/%.cu=$(OUT)/%.kernels.o) $(PARTS:%=$(OUT)/%.o)
CXX := g++
# No fused multiply-add and no assumptions on types that CUDA code does not keep; lines for the messages.
FLAGS := -std=c++17 -O1 -g1 -fPIC -mf16c -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Werror
ifdef CHECKED
FLAGS += -DEVERMOE_CHECKED
# Every access calls checks.cpp: none in a memset or memcpy that the compiler makes of a loop.
CHECKS := -fsanitize=thread,undefined --param tsan-instrument-func-entry-exit=0 -fno-tree-loop-distribute-patterns
endif
KERNEL_FLAGS := $(FLAGS) -Wno-unknown-pragmas -Wno-unused-function -include $(HERE)cuda_on_cpu.h
# "evermoe_kernel void name(" or "evermoe_kernel evermoe_bounds<n> void name(", in either order
MARK := evermoe_kernel[^(;]*\(

$(LIBRARY): $(OBJECTS)
	$(CXX) -shared -Wl,-soname,$(@F) -o $@ $^
	$(if $(DRIVER),ln -sf libcuda.so $(OUT)/libcuda.so.1)

$(OUT)/%.kernels.cpp: $(KERNELS)/%.cu $(wildcard $(KERNELS)/*.cuh $(KERNELS)/*.h) $(HERE)build.mk $(HERE)cuda_on_cpu.h
	@mkdir -p $(OUT)
	{ echo '#include "$(abspath $<)"'; \
	  $(CXX) $(KERNEL_FLAGS) -E -P -DEVERMOE_LIST_KERNELS -x c++ $< | tr '\n' ' ' | grep -oE '$(MARK)' \
	  | sed -E 's/.*evermoe_bounds<([^>]*)>(.*)/\2 \1 /; t bounds; s/$$/ 1024 /; : bounds; s/.*[ >]([A-Za-z_0-9]+) *\( *([^ ]+) *$$/EVERMOE_KERNEL(\1, \2)/'; \
	} > $@

$(OUT)/%.kernels.o: $(OUT)/%.kernels.cpp
	$(CXX) $(KERNEL_FLAGS) $(CHECKS) -MMD -MP -c -o $@ $<

$(OUT)/%.o: $(HERE)%.cpp $(HERE)build.mk
	@mkdir -p $(OUT)
	$(CXX) $(FLAGS) -O2 -MMD -MP -c -o $@ $<

.PRECIOUS: $(OUT)/%.kernels.cpp
-include $(wildcard $(OUT)/*.d)
