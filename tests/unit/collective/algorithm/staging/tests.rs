//! The teams of `kernels/staged.cu` as a model: all members' plans, cut into parts and taken through slots in any order
//! that the counts allow, give what the collectives promise; and nobody gets stuck.

use super::*;
use crate::fabric::{
    layout::STAGED_SLOTS as SLOTS,
    plan::{
        Counts,
        tests::{Memory, check_whole, empty, filled, value},
    },
    tiling::GRAIN,
};
use proptest::prelude::*;

/// A fold that depends on the order.
fn folded(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(7, |acc, x| acc.wrapping_mul(31).wrapping_add(x))
}

/// Counts of one block: `[member][PUT, DONE, TAKEN]`.
type Said = Vec<[usize; 3]>;
const PUT: usize = 0;
const DONE: usize = 1;
const TAKEN: usize = 2;

struct Model<'a> {
    plans: &'a [Staging],
    cut: Tiling,
    sources: Memory,
    /// None: in place.
    destinations: Option<Memory>,
    /// `[block][member][slot][lane][element]`
    stages: Vec<Vec<Vec<Memory>>>,
    said: Vec<Said>,
}

impl Model<'_> {
    fn part(&self, j: usize, block: usize, len: usize) -> Range<usize> {
        self.cut.range(j * self.cut.abreast + block, len)
    }

    fn write(&mut self, member: usize, at: usize, value: u64) {
        let memory = self.destinations.as_mut().unwrap_or(&mut self.sources);
        memory[member][at] = value;
    }

    /// Whether all others have said so; of puts, the member itself, too.
    fn all(&self, block: usize, me: usize, what: usize, count: usize) -> bool {
        let said = &self.said[block];
        (0..said.len()).all(|k| said[k][what] >= count || k == me && what != PUT)
    }

    /// The next thing that a member's team does in a block, if it may; false when it has to wait, or is through.
    fn step(&mut self, block: usize, me: usize, team: usize) -> bool {
        let plan = &self.plans[me];
        let j = self.said[block][me][team];
        if j == self.cut.rounds || team == TAKEN && !plan.two {
            return false;
        }
        let free = j.saturating_sub(SLOTS - 1);
        let may = match team {
            PUT => j < SLOTS || self.all(block, me, DONE, free),
            DONE => self.all(block, me, PUT, j + 1) && (!plan.two || j < SLOTS || self.all(block, me, TAKEN, free)),
            _ => self.all(block, me, DONE, j + 1),
        };
        if !may {
            return false;
        }
        match team {
            PUT => self.put(block, me, j),
            DONE => {
                self.fold(block, me, j);
                if !plan.two {
                    self.pull(block, me, j);
                }
            }
            _ => self.pull(block, me, j),
        }
        self.said[block][me][team] += 1;
        true
    }

    fn put(&mut self, block: usize, me: usize, j: usize) {
        let plan = &self.plans[me];
        for (lane, range) in &plan.puts {
            for (i, at) in self.part(j, block, range.len()).enumerate() {
                self.stages[block][me][j % SLOTS][*lane][i] = self.sources[me][range.start + at];
            }
        }
        if let Some((from, to, len)) = plan.stays {
            self.part(j, block, len).for_each(|at| self.write(me, to + at, self.sources[me][from + at]));
        }
    }

    fn fold(&mut self, block: usize, me: usize, j: usize) {
        let Some(fold) = &self.plans[me].fold else { return };
        let lane = if self.plans[me].lanes == 1 { 0 } else { me };
        for (i, at) in self.part(j, block, fold.len).enumerate() {
            let source = |k: usize| match k == me {
                true => self.sources[me][fold.source + at],
                false => self.stages[block][k][j % SLOTS][lane][i],
            };
            let result = folded((0..self.plans.len()).map(source));
            if let Some(start) = fold.destination {
                self.write(me, start + at, result);
            }
            if fold.result {
                self.stages[block][me][j % SLOTS][lane][i] = result;
            }
        }
    }

    fn pull(&mut self, block: usize, me: usize, j: usize) {
        for &(member, lane, start, len) in &self.plans[me].pulls {
            for (i, at) in self.part(j, block, len).enumerate() {
                let value = self.stages[block][member][j % SLOTS][lane][i];
                self.write(me, start + at, value);
            }
        }
    }
}

/// Runs a collective to its end, taking what may be done in an order drawn from `seed`.
fn run(shape: &Shape, n: usize, grain: usize, blocks: usize, seed: u64, from: &mut Memory, to: Option<&mut Memory>) {
    let plans: Vec<_> = (0..n).map(|me| shape.staging(n, me, grain)).collect();
    let (most, lanes) = (plans[0].most, plans[0].lanes);
    assert!(plans.iter().all(|plan| (plan.most, plan.lanes, plan.two) == (most, lanes, plans[0].two)), "{shape:?}");
    let chunk = 3;
    let cut = Tiling { tile: chunk, abreast: blocks, rounds: most.div_ceil(blocks * chunk) };
    // What nobody has put there is not what anybody expects.
    let stage = vec![vec![vec![u64::MAX; chunk]; lanes]; SLOTS];
    let mut model = Model {
        plans: &plans,
        cut,
        sources: from.clone(),
        destinations: to.as_deref().cloned(),
        stages: vec![vec![stage; n]; blocks],
        said: vec![vec![[0; 3]; n]; blocks],
    };
    let mut state = seed | 1;
    let mut draw = |most: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % most
    };
    let actors: Vec<_> =
        (0..blocks).flat_map(|block| (0..n).flat_map(move |me| (0..3).map(move |team| (block, me, team)))).collect();
    // Often one team is as late as it can be.
    let late = (draw(3) > 0).then(|| (draw(n), draw(3)));
    loop {
        let first = draw(actors.len());
        let next = || (0..actors.len()).map(|k| actors[(first + k) % actors.len()]);
        let is_late = |(_, me, team)| Some((me, team)) == late;
        let mut step = |(block, me, team)| model.step(block, me, team);
        if !next().filter(|&actor| !is_late(actor)).any(&mut step) && !next().any(&mut step) {
            break;
        }
    }
    let through = if plans[0].two { [cut.rounds; 3] } else { [cut.rounds, cut.rounds, 0] };
    assert!(model.said.iter().flatten().all(|said| *said == through), "{shape:?} is stuck: {:?}", model.said);
    *from = model.sources;
    if let (Some(to), Some(model)) = (to, model.destinations) {
        *to = model;
    }
}

fn sum(n: usize, i: usize) -> u64 {
    folded((0..n).map(|k| value(k, i)))
}

proptest! {
    #[test]
    fn every_collective_does_what_it_says(
        n in 2usize..7,
        len in 0usize..90,
        grain in prop::sample::select(vec![1usize, 4, 32]),
        blocks in 1usize..4,
        root in 0usize..9,
        counts in prop::collection::vec(0usize..30, 9),
        table in prop::collection::vec(prop::collection::vec(0usize..20, 9), 9),
        seed in any::<u64>(),
    ) {
        let root = root % n;
        let run = |shape: &Shape, from: &mut Memory, to: Option<&mut Memory>| {
            run(shape, n, grain, blocks, seed, from, to);
        };

        check_whole(n, len, root, |i| sum(n, i), run);

        let by = Counts::By(counts[..n].into());
        let total = by.total(n);
        for in_place in [false, true] {
            let shape = Shape::ReduceScatter { counts: by.clone(), in_place };
            let (mut x, mut y) = (filled(n, |_| total), empty(n, |k| counts[k]));
            run(&shape, &mut x, (!in_place).then_some(&mut y));
            for k in 0..n {
                let part = by.part(k);
                let found = if in_place { &x[k][part.clone()] } else { &y[k][..] };
                prop_assert!(part.clone().zip(found).all(|(i, found)| *found == sum(n, i)));
                prop_assert!((0..total).all(|i| in_place && part.contains(&i) || x[k][i] == value(k, i)));
            }

            let shape = Shape::AllGather { counts: by.clone(), in_place };
            let (mut x, mut y) = (filled(n, |k| if in_place { total } else { counts[k] }), empty(n, |_| total));
            run(&shape, &mut x, (!in_place).then_some(&mut y));
            let found = if in_place { &x } else { &y };
            let right = (0..n).all(|k| {
                let start = by.part(k).start;
                let expected = |i: usize| value(k, if in_place { start + i } else { i });
                (0..counts[k]).all(|i| found.iter().all(|x| x[start + i] == expected(i)))
            });
            prop_assert!(right);
        }

        let (mut x, mut y) = (filled(n, |k| counts[k]), empty(n, |k| if k == root { total } else { 0 }));
        run(&Shape::Gather { counts: by.clone(), root }, &mut x, Some(&mut y));
        prop_assert!((0..n).all(|k| (0..counts[k]).all(|i| y[root][by.part(k).start + i] == value(k, i))));

        let (mut x, mut y) = (filled(n, |k| if k == root { total } else { 0 }), empty(n, |k| counts[k]));
        run(&Shape::Scatter { counts: by.clone(), root }, &mut x, Some(&mut y));
        prop_assert!((0..n).all(|k| (0..counts[k]).all(|i| y[k][i] == value(root, by.part(k).start + i))));

        let row = |k: usize| Counts::By(table[k][..n].into());
        let column = |k: usize| Counts::By((0..n).map(|from| table[from][k]).collect::<Vec<_>>().into());
        let shape = Shape::AllToAll { send: (0..n).map(row).collect(), receive: (0..n).map(column).collect() };
        let (mut x, mut y) = (filled(n, |k| row(k).total(n)), empty(n, |k| column(k).total(n)));
        run(&shape, &mut x, Some(&mut y));
        for (a, b) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))) {
            let (out, into) = (row(a).part(b), column(b).part(a));
            prop_assert!(out.zip(into).all(|(out, into)| y[b][into] == value(a, out)));
        }
    }

    /// Every byte is in one part, and every lane fits into its slot.
    #[test]
    fn cuts_cover_everything(
        most in prop_oneof![0usize..5000, 0usize..2_000_000, 1usize << 33..1 << 34],
        lanes in 1usize..17,
        blocks in 1usize..65,
        slot in prop::sample::select(vec![2048usize, 32 << 10, 1 << 20]),
    ) {
        let cut = cutting(most, lanes, blocks, slot);
        let Tiling { tile, abreast, rounds } = cut;
        prop_assert!(tile.is_multiple_of(GRAIN) && tile > 0 && tile * lanes <= slot && abreast <= blocks);
        prop_assert!(rounds * abreast * tile >= most);
        prop_assert!(most == 0 || (rounds - 1) * abreast * tile < most);
    }
}

/// What the size of a piece was chosen for.
#[test]
fn small_ones_are_one_piece_and_large_ones_fill_their_slots() {
    let of = |most, lanes| cutting(most, lanes, 64, 16 << 10);
    assert_eq!(of(1, 1), Tiling { tile: 4096, abreast: 1, rounds: 1 });
    assert_eq!(of(64 << 10, 1), Tiling { tile: 4096, abreast: 16, rounds: 1 });
    assert_eq!(of(1 << 20, 1), Tiling { tile: 5504, abreast: 64, rounds: 3 });
    assert_eq!(of(1 << 30, 1), Tiling { tile: 16 << 10, abreast: 64, rounds: 1024 });
    assert_eq!(of(1 << 27, 8), Tiling { tile: 2048, abreast: 64, rounds: 1024 });
}
