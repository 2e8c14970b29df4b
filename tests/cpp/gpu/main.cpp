// The tests of the CUDA backend on a GPU. Without one: a line, and exit status 0, or 1 with --require-gpu.
#include <gtest/gtest.h>

#include "device.h"

int main(int argc, char** argv) {
  int status = 0;
  if (specdec::gpu::without_gpu(&argc, argv, "tested", &status)) return status;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
