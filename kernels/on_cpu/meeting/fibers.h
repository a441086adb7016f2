// Several devices on the CPU, for kernels that meet: what they use of CUDA, for g++.
//
// The threads of all blocks are fibers. `__shared__` is `thread_local`, and what a block has there is put in place
// before the block goes on. A generator of random numbers decides which fiber goes on at each access that others can
// see: a seed is an order, and gives the same run again.
//
// Memory is as weak as the kernels must bear it. A store to a signal pad is cut into its single accesses, and each
// arrives when the generator says so. Only these keep an order: stores of one block to one place; those of a block
// before a release of one of its threads, which arrives after them; those of a kernel, which has not ended before they
// have arrived.
#pragma once
#include "../shim.h"
#include <functional>
#include <link.h>
#include <memory>
#include <setjmp.h>
#include <unordered_map>
#include <ucontext.h>

typedef unsigned long long u64;
typedef unsigned short u16;

inline u64 state = 1;
inline u64 random_number() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}
inline bool chance(u64 one_in) { return random_number() % one_in == 0; }

// A single access of 4 or 8 bytes that has not arrived yet. `after`: what its block has sent before that comes first.
// `depth`: how many accesses of other devices, one after the other, it depends on, and itself.
struct Flying {
    u64 at, bytes, value;
    int device;
    u64 number, after, depth;
};

// What one call does, while it is counted: units that each device stores to others, and that it wipes; trips, that is
// the most stores that depend on each other, each on a store of another device.
struct Counted {
    bool on = false;
    u64 sent[16] = {}, taken[16] = {}, trips = 0;
    std::unordered_map<u64, Flying> last; // by address
};
inline Counted counted;

// What a block has sent and what has not arrived yet, in the order in which it was sent.
struct Flights {
    std::vector<Flying> all;
    u64 numbers = 1;
    // How many have places that look alike: few have any, and no search is needed.
    u16 alike[1024] = {};
    u16& count_at(u64 at) { return alike[at / 8 % 1024]; }

    static inline std::vector<Flights*> of_blocks;
    static inline u64 total = 0;
    Flights() { of_blocks.push_back(this); }
    ~Flights() { std::erase(of_blocks, this); }

    void send(u64 at, u64 bytes, u64 value, bool release, int device, u64 depth) {
        const u64 number = numbers++;
        all.push_back({at, bytes, value, device, number, release ? number : 0, depth});
        count_at(at)++, total++;
    }
    // Whether nothing that must come first is under way.
    bool may_arrive(const Flying& next) {
        if (all.front().number < next.after) return false;
        if (count_at(next.at) == 1) return true;
        for (const Flying& other : all) {
            if (other.number >= next.number) break;
            if (other.at < next.at + next.bytes && next.at < other.at + other.bytes) return false;
        }
        return true;
    }
    void arrive(size_t k) {
        memcpy((void*)all[k].at, &all[k].value, all[k].bytes);
        if (counted.on) counted.last[all[k].at] = all[k];
        count_at(all[k].at)--, total--;
        all.erase(all.begin() + k);
    }
};

inline void let_arrive() {
    u64 k = random_number() % Flights::total;
    for (Flights* of : Flights::of_blocks) {
        if (k >= of->all.size()) {
            k -= of->all.size();
            continue;
        }
        // The first of the block's may always.
        for (; !of->may_arrive(of->all[k]); k = (k + 1) % of->all.size()) {}
        return of->arrive(k);
    }
}

// The program's `thread_local` variables: `__shared__` is such a one, and each block has its own.
struct Variables {
    char* at = nullptr;
    size_t size = 0;

    Variables() {
        const auto find = [](dl_phdr_info* info, size_t, void* to) {
            for (unsigned k = 0; k < info->dlpi_phnum; k++) {
                if (info->dlpi_phdr[k].p_type != PT_TLS) continue;
                *(Variables*)to = Variables((char*)info->dlpi_tls_data, info->dlpi_phdr[k].p_memsz);
            }
            return 1; // The program itself comes first.
        };
        dl_iterate_phdr(find, this);
    }
    Variables(char* at, size_t size) : at(at), size(size) {}

    void take(std::vector<char>& from) const {
        from.resize(size);
        memcpy(at, from.data(), size);
    }
    void put(std::vector<char>& to) const { memcpy(to.data(), at, size); }
};

struct Block;
inline thread_local Block* here = nullptr;

struct Fiber {
    // Where it begins, and where it goes on: by longjmp, since swapcontext calls the system.
    ucontext_t context;
    jmp_buf at;
    bool begun = false;
    std::unique_ptr<char[]> stack;
    unsigned thread;
    bool waits = false, ended = false;
    bool vote = true;
    // The barrier that it waits at: that of the block, or one of some threads.
    unsigned barrier = 0, of = 0;
    u64 given = 0; // to the other threads of its warp
    u64 depth = 0; // of what it has seen
};

// The threads of one block. `run` lets some of them go on.
struct Block {
    int device;
    unsigned index, blocks, threads, width;
    std::function<void()> kernel; // empty: nothing to do
    std::vector<Fiber> fibers;
    Flights sent;
    jmp_buf scheduler;
    Fiber* current = nullptr;
    bool all = true; // the last vote
    unsigned ended = 0;
    // The values of its `thread_local` variables while another block runs; empty before its first turn.
    std::vector<char> own;

    Block(int device, unsigned index, unsigned threads)
        : device(device), index(index), threads(threads), width(threads), fibers(threads) {
        for (auto& fiber : fibers) fiber.stack.reset(new char[STACK]);
    }
    static const size_t STACK = 256 << 10;

    // Some turns of the block, if it has a kernel.
    void run() {
        static const Variables variables;
        variables.take(own);
        here = this;
        for (u64 turns = 1 + random_number() % 24; turns > 0 && kernel; turns--) turn();
        variables.put(own);
    }
    // `x` threads in a row of the block.
    void begin(unsigned grid, std::function<void()> work, unsigned x = 0) {
        blocks = grid, kernel = std::move(work), ended = 0, width = x ? x : threads;
        for (unsigned t = 0; t < threads; t++) {
            Fiber& fiber = fibers[t];
            fiber.thread = t, fiber.waits = fiber.ended = fiber.begun = false, fiber.depth = 0;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK;
            makecontext(&fiber.context, (void (*)())enter, 0);
        }
    }
    static void enter() {
        here->kernel();
        here->current->ended = true;
        here->ended++;
        counted.trips = std::max(counted.trips, here->current->depth);
        _longjmp(here->scheduler, 1);
    }
    void go_on(Fiber& fiber) {
        if (_setjmp(scheduler)) return;
        if (fiber.begun) _longjmp(fiber.at, 1);
        fiber.begun = true;
        setcontext(&fiber.context);
    }
    void turn() {
        const unsigned first = random_number() % threads;
        for (unsigned k = 0; k < threads; k++) {
            Fiber& fiber = fibers[(first + k) % threads];
            if (fiber.waits || fiber.ended) continue;
            current = &fiber;
            threadIdx = {fiber.thread % width, fiber.thread / width, 0}, blockIdx = {index, 0, 0};
            blockDim = {width, threads / width}, gridDim = {blocks};
            go_on(fiber);
            break;
        }
        unsigned waiting = 0, together = 0;
        for (const Fiber& fiber : fibers) waiting += fiber.waits && !fiber.barrier;
        const auto in_group = [&](const Fiber& fiber) { return fiber.waits && fiber.barrier == current->barrier; };
        for (const Fiber& fiber : fibers) together += current->waits && current->barrier && in_group(fiber);
        if (together > 0 && together == current->of) {
            const unsigned barrier = current->barrier;
            for (Fiber& fiber : fibers) fiber.waits &= fiber.barrier != barrier;
        }
        if (waiting > 0 && waiting + ended == threads) {
            // A thread that has ended would never come.
            if (ended > 0) printf("a barrier of a block that some threads have left\n"), exit(1);
            all = true;
            u64 depth = 0;
            for (Fiber& fiber : fibers) depth = std::max(depth, fiber.depth);
            for (Fiber& fiber : fibers) all &= fiber.vote, fiber.waits = false, fiber.depth = depth;
        }
        if (ended == threads) kernel = nullptr;
    }
    void pause() {
        if (!_setjmp(current->at)) _longjmp(scheduler, 1);
    }
};

inline void pause_sometimes() {
    if (chance(3)) here->pause();
}
inline bool __syncthreads_and(bool vote) {
    here->current->vote = vote, here->current->waits = true, here->current->barrier = 0;
    here->pause();
    return here->all;
}
inline void __syncthreads() { __syncthreads_and(true); }
// A barrier of `threads` threads of the block, by number.
inline void sync_some(unsigned id, unsigned threads) {
    Fiber& fiber = *here->current;
    fiber.waits = true, fiber.barrier = id, fiber.of = threads;
    here->pause();
}
inline void __syncwarp() {}
template <class V> V __shfl_xor_sync(unsigned, V x, unsigned far) {
    const unsigned thread = here->current->thread;
    memcpy(&here->current->given, &x, sizeof(V));
    sync_some(100 + thread / 32, 32);
    memcpy(&x, &here->fibers[thread ^ far].given, sizeof(V));
    sync_some(100 + thread / 32, 32);
    return x;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline unsigned __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicAdd(unsigned* at, unsigned x) {
    pause_sometimes();
    return (*at += x) - x;
}

// What a block has sent and what has not arrived yet, it sees itself.
inline void send(u64 at, u64 bytes, u64 value, bool release) {
    here->sent.send(at, bytes, value, release, here->device, here->current->depth + 1);
}
inline u64 seen(u64 at, u64 bytes) {
    u64 value = 0;
    memcpy(&value, (void*)at, bytes);
    if (counted.on && counted.last.count(at)) {
        const Flying& last = counted.last[at];
        if (last.device != here->device) here->current->depth = std::max(here->current->depth, last.depth);
    }
    if (here->sent.count_at(at) == 0) return value;
    for (const Flying& own : here->sent.all) {
        if (own.at == at && own.bytes == bytes) value = own.value;
    }
    return value;
}
