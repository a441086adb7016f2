use super::*;

/// Pieces fill whole grains, fit their slot, and cover everything.
#[test]
fn pieces_fit() {
    for lanes in [1, 2, 3, 7, 64] {
        for slot in [lanes * GRAIN, 3000 * GRAIN, SLOT] {
            for most in [0, 1, 127, 128, 129, 40_000, 100_003, 5 << 20] {
                let Tiling { tile: chunk, rounds: steps, .. } = cut(most, lanes, slot);
                assert!(chunk % GRAIN == 0 && chunk > 0 && chunk * lanes <= slot, "{lanes} {slot} {most}: {chunk}");
                assert!(chunk * steps >= most && chunk * steps.saturating_sub(1) <= most);
                assert!(steps <= PIECES || chunk == slot / lanes / GRAIN * GRAIN);
                assert!(chunk * lanes <= LEAST + lanes * GRAIN || steps >= PIECES - 1);
            }
        }
    }
}
