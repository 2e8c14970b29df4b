#include "executor.h"

#include <algorithm>
#include <random>
#include <tuple>
#include <utility>

namespace specdec::simt {

Thread* current = nullptr;

namespace {

const char* name_of(Sync sync) {
  switch (sync) {
    case Sync::kNone:
      return "nothing";
    case Sync::kBarrier:
      return "a barrier";
    case Sync::kWarpBarrier:
      return "warp_barrier";
    case Sync::kShuffle:
      return "a shuffle";
    case Sync::kVote:
      return "a vote";
    case Sync::kMmaTf32:
      return "mma_tf32";
    case Sync::kMmaBf16:
      return "mma_bf16";
    case Sync::kLoadMatrix:
      return "load_matrix";
  }
  return "?";
}

std::string whereabouts(const Session& session, const Thread& thread) {
  const std::string name = "thread " + std::to_string(thread.index);
  const uint32_t bit = uint32_t{1} << thread.lane;
  if ((thread.warp->done & bit) != 0) return name + " has returned";
  if ((thread.warp->polling & bit) != 0) return name + " waits for a flag";
  return name + " waits for " + name_of(thread.sync) + " at line " +
         std::to_string(session.places.where(thread.place).line);
}

}  // namespace

Executor::Executor(Session& session, KernelCounts& counts, cuda::Index3 grid, int threads,
                   int64_t shared_bytes, uint32_t launch, void (*body)(const void*), const void* params)
    : session(session),
      counts(counts),
      requests(session.memory),
      grid(grid),
      threads(threads),
      shared_bytes(shared_bytes),
      launch(launch),
      body_(body),
      params_(params) {}

// --- blocks ---

void Executor::run() {
  const int64_t total = int64_t{grid.x} * grid.y * grid.z;
  std::vector<int64_t> order(static_cast<size_t>(total));
  for (int64_t i = 0; i < total; ++i) order[static_cast<size_t>(i)] = i;
  std::mt19937_64 random(session.options.seed);
  std::shuffle(order.begin(), order.end(), random);

  // Rounds over the blocks in which no memory changed, and in which no block came or went. A thread may look
  // at a flag a few times for other reasons than to wait for it, and may change memory while it waits.
  constexpr int kMostIdleRounds = 1000, kBusyRounds = 100, kMostBusyRounds = 1'000'000;
  int64_t started = 0;
  int idle_rounds = 0, busy_rounds = 0;
  while (started < total || !active_.empty()) {
    const bool may_start =
        started < total && active_.size() < static_cast<size_t>(session.options.resident_blocks);
    if (active_.empty() || (may_start && (idle_rounds > 0 || busy_rounds > kBusyRounds))) {
      if (spare_.empty()) {
        spare_.push_back(std::make_unique<Block>(threads, shared_bytes));
        spare_.back()->executor = this;
      }
      const int64_t i = order[static_cast<size_t>(started++)];
      active_.push_back(std::move(spare_.back()));
      spare_.pop_back();
      active_.back()->start({static_cast<int32_t>(i % grid.x), static_cast<int32_t>(i / grid.x % grid.y),
                             static_cast<int32_t>(i / grid.x / grid.y)},
                            i, random());
      idle_rounds = busy_rounds = 0;
    }
    ++busy_rounds;
    const int64_t before = progress_;
    for (size_t b = 0; b < active_.size();) {
      Block& block = *active_[b];
      for (Warp& warp : block.warps) warp.ready |= std::exchange(warp.polling, 0);
      block.run();
      bool polling = false;
      for (const Warp& warp : block.warps) polling = polling || warp.polling != 0;
      if (block.done < threads && polling && !block.failed) {
        ++b;
        continue;
      }
      if (block.done < threads && !block.failed) report_stuck(block);
      ++progress_;
      busy_rounds = 0;
      spare_.push_back(std::move(active_[b]));
      active_.erase(active_.begin() + static_cast<int64_t>(b));
      if (block.done < threads) abandon(block);
    }
    idle_rounds = progress_ == before ? idle_rounds + 1 : 0;
    if (idle_rounds > kMostIdleRounds || busy_rounds > kMostBusyRounds) {
      for (auto& block : active_) {
        report_polling(*block, started, total);
        abandon(*block);
        spare_.push_back(std::move(block));
      }
      active_.clear();
      started = total;
    }
  }
  counts.blocks += total;
  summarize();
}

void Executor::abandon(Block& block) {
  for (Thread& thread : block.threads) thread.fiber.abandon();
}

// No thread of the block can run, some have not returned, and none waits for another block.
void Executor::report_stuck(Block& block) {
  for (Warp& warp : block.warps) {
    for (Thread* thread : warp.lanes) {
      if ((warp.waiting >> thread->lane & 1) == 0) continue;
      const bool at_barrier = thread->sync == Sync::kBarrier;
      // One finding for each place: who waits there, and an example of who does not.
      const Thread* absent = nullptr;
      for (Thread& other : block.threads) {
        if (!at_barrier && other.warp != &warp) continue;
        const bool same = (other.warp->waiting >> other.lane & 1) != 0 && other.sync == thread->sync &&
                          other.detail == thread->detail;
        if (!same) absent = absent == nullptr ? &other : absent;
      }
      std::string text = std::string("waits for ") + name_of(thread->sync);
      if (at_barrier) text += " " + std::to_string(thread->detail);
      if (absent != nullptr) text += ", but " + whereabouts(session, *absent);
      find(at_barrier ? FindingKind::kBarrier : FindingKind::kAbsentLanes, *thread, thread->place, text,
           {absent == nullptr ? -1 : absent->index, absent == nullptr ? 0 : absent->place, false});
    }
  }
}

void Executor::report_polling(Block& block, int64_t started, int64_t total) {
  for (Warp& warp : block.warps) {
    for (Thread* thread : warp.lanes) {
      if ((warp.polling >> thread->lane & 1) == 0) continue;
      find(FindingKind::kDeadlock, *thread, thread->place,
           "waits for a flag that nobody sets; " + std::to_string(started) + " of " + std::to_string(total) +
               " blocks had started, at most " + std::to_string(session.options.resident_blocks) +
               " at a time");
    }
  }
}

void Executor::summarize() {
  for (size_t p = 0; p < requests.places.size(); ++p) {
    const RequestCounter::PlaceCounts& from = requests.places[p];
    const auto add = [](auto& to, const GlobalTraffic& traffic) {
      to.bytes += traffic.bytes;
      to.requests += traffic.requests;
      to.sectors += traffic.sectors;
    };
    if (from.read.requests + from.write.requests + from.shared.requests == 0) continue;
    const Where where = session.places.where(static_cast<uint32_t>(p));
    auto line = std::find_if(counts.lines.begin(), counts.lines.end(), [&](const LineCounts& l) {
      return l.line == where.line && l.file == where.file;
    });
    if (line == counts.lines.end()) {
      line = counts.lines.insert(line, LineCounts{where.file, where.line, {}, {}, {}});
    }
    add(line->read, from.read);
    add(line->write, from.write);
    add(counts.read, from.read);
    add(counts.write, from.write);
    for (SharedTraffic* to : {&line->shared, &counts.shared}) {
      to->requests += from.shared.requests;
      to->wavefronts += from.shared.wavefronts;
      to->worst = std::max(to->worst, from.shared.worst);
    }
  }
  std::sort(counts.lines.begin(), counts.lines.end(), [](const LineCounts& a, const LineCounts& b) {
    return std::tie(a.file, a.line) < std::tie(b.file, b.line);
  });
  for (const Buffer& buffer : session.memory.buffers()) {
    const Traffic traffic = std::exchange(buffer.traffic, {});
    auto to = std::find_if(counts.buffers.begin(), counts.buffers.end(),
                           [&](const BufferCounts& b) { return b.name == buffer.name(); });
    if (to == counts.buffers.end()) to = counts.buffers.insert(to, BufferCounts{buffer.name()});
    to->bytes_read += traffic.read;
    to->bytes_written += traffic.written;
    constexpr auto kBytes = static_cast<int64_t>(kSectorBytes);
    to->footprint_read += traffic.sectors_read.size() * kBytes;
    to->footprint_written += traffic.sectors_written.size() * kBytes;
    counts.footprint_read += traffic.sectors_read.size() * kBytes;
    counts.footprint_written += traffic.sectors_written.size() * kBytes;
  }
}

// --- threads ---

void Executor::thread_main(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  Executor& executor = *thread.block->executor;
  executor.body_(executor.params_);
  executor.finish(thread);
}

void Executor::finish(Thread& thread) {
  if (!thread.copies.empty()) {
    find(FindingKind::kAsyncNotWaited, thread, thread.copies.front().place,
         "returns without a wait for this copy");
  }
  thread.warp->done |= uint32_t{1} << thread.lane;
  ++thread.block->done;
  ++progress_;
  arrive(thread);
}

void Executor::suspend(Thread& thread, uint32_t Warp::* list) {
  thread.warp->*list |= uint32_t{1} << thread.lane;
  thread.fiber.yield();
}

// The thread waits or has returned: where that holds for all of its warp, the accesses so far are complete.
void Executor::arrive(Thread& thread) {
  Warp& warp = *thread.warp;
  const uint32_t bit = uint32_t{1} << thread.lane;
  if ((warp.waiting | warp.done | bit) != ~uint32_t{0}) return;
  std::vector<AccessRecord>* lanes[kWarpSize];
  for (int l = 0; l < kWarpSize; ++l) lanes[l] = &warp.lanes[l]->records;
  requests.count(lanes);
}

void Executor::poll() { suspend(*current, &Warp::polling); }

void Executor::wait_for_warp(Sync sync, int detail, void* operands, uint32_t place) {
  Thread& thread = *current;
  Warp& warp = *thread.warp;
  thread.sync = sync;
  thread.detail = detail;
  thread.operands = operands;
  thread.place = place;
  arrive(thread);
  if (++warp.at_operation < kWarpSize) return suspend(thread, &Warp::waiting);

  const Thread* odd = nullptr;
  for (const Thread* other : warp.lanes) {
    if (other->sync != sync || other->detail != detail) odd = other;
  }
  if (odd != nullptr) {
    find(FindingKind::kAbsentLanes, thread, place,
         std::string("reaches ") + name_of(sync) + ", but " + whereabouts(session, *odd),
         {odd->index, odd->place, false});
    thread.block->failed = true;
    return suspend(thread, &Warp::waiting);
  }
  execute_operation(warp);
  if (sync == Sync::kWarpBarrier) {
    warp.joined[static_cast<size_t>(warp.index)] = warp.epoch++;
    KnowledgePtr known;
    for (const Thread* other : warp.lanes) known = merged(known, other->known);
    for (Thread* other : warp.lanes) other->known = known;
  }
  warp.at_operation = 0;
  warp.ready |= warp.waiting;
  warp.waiting = 0;
  ++progress_;
}

void Executor::wait_at_barrier(int id, int expected, uint32_t place) {
  Thread& thread = *current;
  Block& block = *thread.block;
  Barrier& barrier = block.barriers[id];
  thread.sync = Sync::kBarrier;
  thread.detail = id;
  thread.place = place;
  if (barrier.arrived.empty()) {
    barrier.expected = expected;
  } else if (barrier.expected != expected) {
    find(FindingKind::kBarrier, thread, place,
         "wants " + std::to_string(expected) + " threads at barrier " + std::to_string(id) +
             ", another wants " + std::to_string(barrier.expected),
         {barrier.arrived.front()->index, barrier.arrived.front()->place, false});
  }
  barrier.arrived.push_back(&thread);
  arrive(thread);
  if (static_cast<int>(barrier.arrived.size()) < barrier.expected) return suspend(thread, &Warp::waiting);
  // This thread goes on at once; the others are ready again.
  thread.warp->waiting |= uint32_t{1} << thread.lane;
  release_barrier(block, barrier);
  thread.warp->ready &= ~(uint32_t{1} << thread.lane);
}

void Executor::release_barrier(Block& block, Barrier& barrier) {
  const Thread& first = *barrier.arrived.front();
  std::vector<uint32_t> released(block.warps.size()), joined(block.warps.size());
  const Thread* odd = nullptr;
  for (const Thread* thread : barrier.arrived) {
    released[static_cast<size_t>(thread->warp->index)] |= uint32_t{1} << thread->lane;
    if (thread->place != first.place) odd = thread;
  }
  // Named barriers are how warps with different work meet; the block's barrier is one place for all.
  if (odd != nullptr && first.detail == 0) {
    find(FindingKind::kBarrier, *odd, odd->place,
         "reaches the block's barrier here, but " + whereabouts(session, first),
         {first.index, first.place, false});
  }
  for (size_t w = 0; w < released.size(); ++w) {
    if (released[w] == 0) continue;
    Warp& warp = block.warps[w];
    if (released[w] != ~uint32_t{0}) {
      const Thread& part = *warp.lanes[__builtin_ctz(released[w])];
      find(FindingKind::kBarrier, part, part.place, "only a part of the warp reaches the barrier");
    }
    warp.joined[w] = warp.epoch++;
    for (size_t v = 0; v < joined.size(); ++v) joined[v] = std::max(joined[v], warp.joined[v]);
  }
  for (size_t w = 0; w < released.size(); ++w) {
    if (released[w] == 0) continue;
    Warp& warp = block.warps[w];
    warp.joined = joined;
    warp.waiting &= ~released[w];
    warp.ready |= released[w];
  }
  KnowledgePtr known;
  for (const Thread* thread : barrier.arrived) known = merged(known, thread->known);
  for (Thread* thread : barrier.arrived) thread->known = known;
  barrier.arrived.clear();
  ++counts.barriers;
  ++progress_;
}

// --- flags between blocks ---

KnowledgePtr Executor::knowledge_of(const Thread& thread) const {
  auto own = std::make_shared<Knowledge>();
  BlockClock& clock = (*own)[thread.block->number];
  clock.joined = thread.warp->joined;
  clock.threads[thread.index] = thread.warp->epoch;
  return merged(thread.known, own);
}

void Executor::acquire(uintptr_t flag) {
  const auto carried = flags_.find(flag);
  if (carried != flags_.end()) current->known = merged(current->known, carried->second);
}

void Executor::release(uintptr_t flag) { flags_[flag] = knowledge_of(*current); }

void Executor::update(uintptr_t flag) {
  KnowledgePtr& carried = flags_[flag];
  current->learned = merged(current->learned, carried);
  carried = merged(carried, current->fenced);
}

void Executor::fence() {
  current->known = merged(current->known, std::exchange(current->learned, nullptr));
  current->fenced = knowledge_of(*current);
}

// --- accesses and findings ---

void Executor::access(Access kind, uint64_t address, int bytes, uint32_t place) {
  const auto log2 = static_cast<uint32_t>(__builtin_ctz(static_cast<unsigned>(bytes)));
  current->records.push_back({address, place << 8 | log2 << 4 | static_cast<uint32_t>(kind)});
}

void Executor::find(FindingKind kind, const Thread& thread, uint32_t place, std::string text,
                    const Conflict& other) {
  const Where where = session.places.where(place);
  const int other_line = other.thread < 0 ? 0 : session.places.where(other.place).line;
  auto& findings = session.report.findings;
  for (Finding& known : findings) {
    if (known.kind == kind && known.line == where.line && known.other_line == other_line &&
        known.file == where.file && known.kernel == counts.kernel) {
      ++known.count;
      return;
    }
  }
  if (static_cast<int>(findings.size()) >= session.options.finding_limit) {
    session.report.findings_dropped = true;
    return;
  }
  findings.push_back({kind, counts.kernel, thread.block->index, thread.index, where.file, where.line,
                      other.thread, other_line, std::move(text), 1});
}

}  // namespace specdec::simt
