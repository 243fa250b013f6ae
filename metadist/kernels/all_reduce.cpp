// A sum of one vector per process in shared memory: each process writes its vector, adds up one
// segment of all vectors in the order of the ranks, and reads the sums.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

constexpr int64_t LINE = 64;        // bytes of a cache line, which two processes never both write
// A process that waits spins so many times, then yields the processor for so long, and then sleeps
// for a sixteenth of the time that it has waited.
constexpr int SPINS = 2000;
constexpr int64_t YIELD_NS = 1000000, LONGEST_SLEEP_NS = 1000000;

enum Status : int64_t { DONE = -1, DIFFERENT_VECTORS = -2 };  // else a rank that is behind

struct alignas(LINE) Progress {  // of one rank; the memory begins with one of these per rank
    std::atomic<uint64_t> steps;
    int64_t length, type;
};

enum Phase : int64_t { WRITE, ADD, READ };

struct Sum {  // the layout of `_State` in distributed/shared_memory.py
    char* memory;
    char* vector;
    int64_t length, capacity;  // in elements; the memory has room for pieces of `capacity`
    int64_t rank, size;
    uint64_t steps;  // of this rank in all sums: two for each piece
    int64_t start, phase;  // of the current piece; WRITE between two sums
    int64_t spins;  // whether to spin before yielding
};

Progress* progress(const Sum& sum, int64_t rank) {
    return reinterpret_cast<Progress*>(sum.memory) + rank;
}

template <typename T>
T* slot(const Sum& sum, int64_t index) {  // the vectors of all ranks, then the sums
    return reinterpret_cast<T*>(sum.memory + sum.size * LINE) + index * sum.capacity;
}

void arrive(Sum& sum) {
    progress(sum, sum.rank)->steps.store(++sum.steps, std::memory_order_release);
}

// Wait until all ranks have made as many steps; returns a rank that has not after some time.
int64_t wait(const Sum& sum, int64_t nanoseconds) {
    using Clock = std::chrono::steady_clock;
    int64_t behind = 0;
    const auto all_arrived = [&] {
        while (behind < sum.size &&
               progress(sum, behind)->steps.load(std::memory_order_acquire) >= sum.steps)
            ++behind;
        return behind == sum.size;
    };
    for (int i = 0; i < SPINS && sum.spins; ++i) {
        if (all_arrived()) return DONE;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const auto began = Clock::now();
    while (!all_arrived()) {
        const int64_t waited = std::chrono::nanoseconds(Clock::now() - began).count();
        if (waited > nanoseconds) return behind;
        if (waited < YIELD_NS)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(
                std::chrono::nanoseconds(std::min(waited / 16, LONGEST_SLEEP_NS)));
    }
    return DONE;
}

template <typename T>
void add_segment(const Sum& sum, int64_t count) {
    const int64_t first = count * sum.rank / sum.size, last = count * (sum.rank + 1) / sum.size;
    T* total = slot<T>(sum, sum.size);
    std::copy(slot<T>(sum, 0) + first, slot<T>(sum, 0) + last, total + first);
    for (int64_t rank = 1; rank < sum.size; ++rank) {
        const T* vector = slot<T>(sum, rank);
        for (int64_t i = first; i < last; ++i) total[i] += vector[i];
    }
}

bool same_vectors(const Sum& sum) {
    const Progress* own = progress(sum, sum.rank);
    for (int64_t rank = 0; rank < sum.size; ++rank) {
        const Progress* other = progress(sum, rank);
        if (other->length != own->length || other->type != own->type) return false;
    }
    return true;
}

template <typename T>
int64_t advance(Sum& sum, int64_t type, int64_t nanoseconds) {
    T* vector = reinterpret_cast<T*>(sum.vector);
    do {
        const int64_t count = std::min(sum.capacity, sum.length - sum.start);
        if (sum.phase == WRITE) {
            std::copy(vector + sum.start, vector + sum.start + count, slot<T>(sum, sum.rank));
            progress(sum, sum.rank)->length = sum.length;
            progress(sum, sum.rank)->type = type;
            arrive(sum);
            sum.phase = ADD;
        }
        if (sum.phase == ADD) {
            if (const int64_t behind = wait(sum, nanoseconds); behind != DONE) return behind;
            if (!same_vectors(sum)) return DIFFERENT_VECTORS;
            add_segment<T>(sum, count);
            arrive(sum);
            sum.phase = READ;
        }
        if (const int64_t behind = wait(sum, nanoseconds); behind != DONE) return behind;
        std::copy(slot<T>(sum, sum.size), slot<T>(sum, sum.size) + count, vector + sum.start);
        sum.start += count;
        sum.phase = WRITE;
    } while (sum.start < sum.length);
    return DONE;
}

}  // namespace

// Continue a sum; returns DONE, DIFFERENT_VECTORS, or a rank that is behind after the time.
extern "C" int64_t all_reduce_f32(Sum* sum, int64_t ns) { return advance<float>(*sum, 1, ns); }
extern "C" int64_t all_reduce_f64(Sum* sum, int64_t ns) { return advance<double>(*sum, 2, ns); }
extern "C" int64_t all_reduce_i64(Sum* sum, int64_t ns) { return advance<int64_t>(*sum, 3, ns); }
