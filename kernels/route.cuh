// Who sends what to whom, where every member has as much for every other one.
#pragma once
#include "meet.cuh"

// Who sends to whom, as bits by rank, and where what one sends begins, in elements for each rank.
struct Route {
    u16 senders, receivers;
    u32 folds;
    u64 out, in;

    __device__ bool sends(u32 rank) const { return senders >> rank & 1; }
    __device__ bool receives(u32 rank) const { return receivers >> rank & 1; }
};

// The rank `k` after this member's. From the next on, so that not all send to the same member first.
__device__ inline u32 rank_after(const Meet& meet, u32 k) {
    const u32 rank = meet.me + k;
    return rank < meet.count ? rank : rank - meet.count;
}

// The other members of a set, from the next on: bit k - 1 is `rank_after(meet, k)`.
__device__ inline u32 others_after(const Meet& meet, u32 set) {
    return (set >> (meet.me + 1) | set << (meet.count - 1 - meet.me)) & ((1u << (meet.count - 1)) - 1);
}
