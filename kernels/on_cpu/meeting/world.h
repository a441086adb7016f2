// What the checks of kernels that meet share: devices with inboxes, arrays between bytes that must stay, numbers to add
// up. The kernels' source, SOURCE, is in it.
#pragma once
#include "fibers.h"
#include <map>
#include "common.cuh"
#include SOURCE

static void require(bool good, const char* what, u64 seed) {
    if (good) return;
    printf("wrong: %s, seed %llu\n", what, seed);
    fflush(stdout);
    _exit(1);
}

static const u64 PACKETS = 4, WHOLE = 2048, SLOT = 256;
// Of a wait, by the clock that goes on when a thread looks at it: threads of slow devices need some hundreds.
static const u64 DEADLINE = 2000;
static const u32 MOST_BLOCKS = 2;
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 64 // most threads of a block
#endif

// A device's memory that others know, and what is under way on it.
struct Machine {
    std::vector<char> memory;
    Signals* signals;
    u64 inbox, bytes, words[2] = {}, report = 0;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::function<void()>> queue; // each begins one kernel
    size_t next = 0;

    Machine(int device, u32 devices, u32 threads) {
        const u64 packets = (devices - 1) * 2 * PACKETS * sizeof(uint4);
        bytes = (devices - 1) * (2 * WHOLE + BLOCKS * SLOTS * SLOT);
        memory.resize(sizeof(Signals) + packets + bytes + 256);
        signals = (Signals*)(((u64)memory.data() + 255) / 256 * 256);
        inbox = (u64)(signals + 1) + packets;
        signals->abort = (u64)words, signals->report = (u64)&report;
        signals->packets = PACKETS, signals->wholes = packets, signals->whole = WHOLE;
        signals->slots = packets + (devices - 1) * 2 * WHOLE, signals->slot = SLOT;
        empty();
        for (u32 b = 0; b < MOST_BLOCKS; b++) blocks.push_back(std::make_unique<Block>(device, b, threads));
    }
    void empty() { memset((void*)inbox, 0xff, bytes); }
    bool is_empty() const {
        for (u64 k = 0; k < bytes; k++) {
            if (*(const u8*)(inbox + k) != 0xff) return false;
        }
        return true;
    }
    bool busy() const {
        for (const auto& block : blocks) {
            if (block->kernel || !block->sent.all.empty()) return true;
        }
        return false;
    }
    bool done() const { return next == queue.size() && !busy(); }
};

struct World {
    std::vector<std::unique_ptr<Machine>> machines;
    u32 threads; // of a block
    // Memory that members keep from call to call, in which there are zeros at first.
    std::map<std::pair<std::vector<u32>, u32>, std::vector<u64>> kept;
    World(u32 devices, u32 threads) : threads(threads) {
        for (u32 d = 0; d < devices; d++) machines.push_back(std::make_unique<Machine>(d, devices, threads));
        for (auto& one : machines) {
            for (u32 d = 0; d < devices; d++) one->signals->peer[d] = (u64)machines[d]->signals;
        }
    }
    void set_epochs(u32 epoch) {
        for (auto& one : machines) {
            for (u32& e : one->signals->epoch) e = epoch;
        }
    }
    // Until all queues are done. From turn `fails` on the gang of this place has failed.
    void run(u64 fails, u64 place) {
        // One device may be slow, for a while or so long that others get to their next kernel.
        bool late = false;
        for (u64 turn = 0, slow = ~0ull, period = 50;; turn++) {
            if (turn == fails) {
                for (auto& one : machines) one->words[0] = place;
            }
            if (chance(period)) {
                slow = chance(2) ? random_number() % machines.size() : ~0ull;
                period = chance(2) ? 50 : 3000;
                late = chance(4);
            }
            bool all = true;
            for (size_t d = 0; d < machines.size(); d++) {
                Machine& one = *machines[d];
                all &= one.done();
                if (one.next < one.queue.size() && !one.busy() && (d != slow || chance(20))) one.queue[one.next++]();
            }
            if (all) break;
            // What is sent comes soon, or so late that all who can have gone on.
            if (Flights::total > 0 && (late ? chance(40) : !chance(3))) {
                for (u64 k = random_number() % 32; k > 0 && Flights::total > 0; k--) let_arrive();
            }
            const u64 d = random_number() % machines.size();
            Block& block = *machines[d]->blocks[random_number() % MOST_BLOCKS];
            if (!block.kernel || (d == slow && !chance(20))) continue;
            block.run();
        }
        for (auto& one : machines) one->queue.clear(), one->next = 0;
    }
};

// `n` elements, the first at any offset, between bytes that must stay.
template <class T> struct Array {
    std::vector<u8> bytes;
    u64 n, begin;
    T* at() { return (T*)begin; }
    explicit Array(u64 n, bool aligned = false) : bytes(n * sizeof(T) + 128, 0x5a), n(n) {
        begin = ((u64)bytes.data() + 31) / 16 * 16 + (aligned || chance(2) ? 0 : random_number() % 4 * sizeof(T));
    }
    bool intact() const {
        const u64 end = begin + n * sizeof(T);
        for (const u8& byte : bytes) {
            const u64 at = (u64)&byte;
            if ((at < begin || at >= end) && byte != 0x5a) return false;
        }
        return true;
    }
};

template <class T> static bool is_nan(T x) { return wide(x) != wide(x); }

// Small numbers whose sums depend on the order, and bits that look like those of an empty inbox, or nearly.
template <class T> static T drawn(bool strange) {
    const u64 ones = ~0ull;
    const u64 bits[] = {ones, ones << 32, 0x3fefffffffffffffull, 0xfffffffeffffffffull, 0x8000000000000000ull,
                        0xffffffffull, 0, 0x7fffffffull, 0xffff0000ffffull};
    if (strange && chance(2)) return from_bits<T>((BitsOf<T>)(bits[random_number() % 9] >> 8 * (8 - sizeof(T)) * chance(2)));
    return narrow<T>((f64)(random_number() >> 44) * 0x1p-16 - 8);
}

// A call, with all members' buffers; `check` when it is over.
struct AnyCall {
    virtual ~AnyCall() {}
    virtual void check(u64 seed) = 0;
};

// `calls` calls of one gang, by all devices or some.
template <class Queued>
static std::vector<std::unique_ptr<AnyCall>> queue(World& world, u32 calls, u64 place, Queued queued) {
    std::vector<std::unique_ptr<AnyCall>> all;
    for (u32 k = 0; k < calls; k++) {
        std::vector<u32> members;
        for (u32 d = 0; d < world.machines.size(); d++) {
            if (!chance(5)) members.insert(members.begin() + random_number() % (members.size() + 1), d);
        }
        if (members.size() < 2) members = {1, 0};
        all.push_back(queued(world, members, place));
    }
    return all;
}

// For each of so many seeds, calls that all must be right, calls of a gang that fails, and calls after it.
template <class Queued> static int each_world(u64 seeds, Queued queued) {
    for (u64 seed = 1; seed <= seeds; seed++) {
        state = seed * 0x9e3779b97f4a7c15ull | 1;
        for (int k = 0; k < 5; k++) random_number();
        const u32 devices[] = {2, 2, 3, 3, 4, 5};
        World world(devices[seed % 6], seed % 8 == 0 ? BLOCK_THREADS : seed % 4 == 0 ? 64 : 32);
        if (chance(2)) world.set_epochs(~0u - random_number() % 4);
        for (u64 place = 1; place <= 3; place++) {
            const bool fails = place == 2;
            const auto calls = queue(world, 5, place, queued);
            world.run(fails ? random_number() % 3000 : ~0ull, place);
            // First: what was given up has no results.
            for (auto& one : world.machines) require(fails || one->report == 0, "a wait that never ends", seed);
            for (const auto& call : calls) {
                if (!fails) call->check(seed);
            }
            for (auto& one : world.machines) {
                require(fails || one->is_empty(), "something is left in an inbox", seed);
                one->empty();
                one->report = 0;
            }
        }
    }
    printf("right\n");
    return 0;
}
