// What the tests of planted faults share: every check of the executor catches a fault that was planted for
// it, at its thread and line, and is silent about the same kernel without the fault. A kernel is right where
// kFault is false.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "simt_kernel.h"

namespace specdec::cuda {

using simt::Finding;
using simt::FindingKind;

// The lines of the fault: HERE, and in a race THERE.
inline const char* fault_file;
inline int fault_line, other_line;
#define HERE fault_file = __FILE__, fault_line = __LINE__;
#define THERE other_line = __LINE__;

// Runs both versions with several orders of warps and lanes. In some of them the reader of a race comes first
// and finds no value either; other faults are found as what they are and as nothing else.
template <TestBody Faulty, TestBody Right, int Threads = 128>
void expect_found(FindingKind kind, const std::function<bool(const Finding&)>& matches, int blocks = 1,
                  const std::function<void(TestSession&)>& prepare = {}) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    TestSession faulty(seed);
    if (prepare) prepare(faulty);
    ASSERT_EQ((faulty.run<Faulty, Threads>(blocks)), Status::kOk);
    const auto& findings = faulty.report.findings;
    ASSERT_FALSE(findings.empty()) << "seed " << seed;
    EXPECT_TRUE(std::any_of(findings.begin(), findings.end(),
                            [&](const Finding& f) {
                              return f.kind == kind && f.file == fault_file &&
                                     f.kernel.find("TestKernel<") == 0 && f.block.x >= 0 &&
                                     f.block.x < blocks && matches(f);
                            }))
        << "seed " << seed << ", lines " << fault_line << ", " << other_line << "\n"
        << faulty.report.to_string();
    if (kind != FindingKind::kRace) {
      for (const Finding& f : findings) EXPECT_EQ(f.kind, kind) << f.to_string();
    }

    TestSession right(seed);
    if (prepare) prepare(right);
    ASSERT_EQ((right.run<Right, Threads>(blocks)), Status::kOk);
    EXPECT_TRUE(right.report.clean()) << "seed " << seed << "\n" << right.report.to_string();
  }
}

inline std::function<bool(const Finding&)> at(int thread) {
  return [=](const Finding& f) { return f.line == fault_line && f.thread == thread; };
}

inline bool at_here(const Finding& f) { return f.line == fault_line; }

// A race is reported by whoever comes second.
inline std::function<bool(const Finding&)> between(std::function<bool(int here, int there)> threads) {
  return [=](const Finding& f) {
    return (f.line == fault_line && f.other_line == other_line && threads(f.thread, f.other_thread)) ||
           (f.line == other_line && f.other_line == fault_line && threads(f.other_thread, f.thread));
  };
}

template <TestBody Faulty, TestBody Right, int Threads = 128>
void expect_race(std::function<bool(int here, int there)> threads) {
  expect_found<Faulty, Right, Threads>(FindingKind::kRace, between(threads));
}

}  // namespace specdec::cuda
