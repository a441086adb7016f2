//! What a member calls, as the meeting compares it and as reports show it.

use super::types::{DType, ReduceOp};
use crate::error::Site;
use std::{any::TypeId, panic::Location, sync::Arc};

/// The operation that launches a graph's collectives together.
pub(crate) const LAUNCH: &str = "launch_graph";

/// Whether a call is made now, or for a graph, or from one, or for a gradient exchange: members must agree on that,
/// too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin(u64);

impl Origin {
    /// It only goes into a graph.
    pub(crate) const CAPTURE: Origin = Origin(1);

    /// From graphs whose first collective was the `number`-th that its group called in the gang at `place`: all members
    /// know that alike, and no other graph has it (nor one of these two numbers).
    pub(crate) fn graph(place: u64, number: u64) -> Self {
        Origin((place.rotate_left(32) ^ number) & !Self::EXCHANGE)
    }

    /// With a further collective, the group's `number`-th: graphs that were captured inside each other may begin with
    /// the same one and be of one length (a step of FNV-1a).
    pub(crate) fn then(self, number: u64) -> Self {
        Origin((self.0 ^ number).wrapping_mul(0x0000_0100_0000_01b3) & !Self::EXCHANGE)
    }

    /// In all numbers of gradient exchanges, and in no others: 39 bits that say which one, and below them its step and
    /// the bucket.
    const EXCHANGE: u64 = 1 << 63;
    const STEP: u64 = (1 << 24) - 1;
    /// Of that, the bits in which the bucket is.
    const BUCKETS: u32 = 10;
    const BUCKET: u64 = (1 << Self::BUCKETS) - 1;

    /// From the gradient exchange that was made when its group called its `number`-th collective in the gang at
    /// `place`. Hashed (Fibonacci), so that it still fits into a meeting in short.
    pub(crate) fn exchange(place: u64, number: u64) -> Self {
        let mixed = (place.rotate_left(32) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Origin(Self::EXCHANGE | ((mixed >> 1) & !Self::STEP))
    }

    /// From a step of that exchange.
    pub(crate) fn in_step(self, step: u64) -> Self {
        Origin((self.0 & !Self::STEP) | (step << Self::BUCKETS & Self::STEP))
    }

    /// For a bucket in that step: those of one length may go in different ways.
    pub(crate) fn of_bucket(self, bucket: usize) -> Self {
        // 0 is none of them.
        Origin((self.0 & !Self::BUCKET) | (1 + bucket as u64 % Self::BUCKET))
    }

    /// As it goes into a message, and out of it.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn of_bits(bits: u64) -> Self {
        Origin(bits)
    }

    fn step(self) -> u64 {
        (self.0 & Self::STEP) >> Self::BUCKETS
    }

    fn is_of_exchange(self) -> bool {
        self.0 & Self::EXCHANGE != 0
    }

    /// What two that are not the same differ in.
    fn differs(self, other: Self) -> &'static str {
        if [self, other].contains(&Origin::CAPTURE) {
            "capture"
        } else if !self.is_of_exchange() && !other.is_of_exchange() {
            "graph"
        } else if self.in_step(0) != other.in_step(0) {
            "exchange"
        } else if self.step() != other.step() {
            "step"
        } else {
            "bucket"
        }
    }
}

/// What a member calls.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) origin: Origin,
    pub(crate) op: &'static str,
    pub(crate) dtype: Option<DType>,
    pub(crate) count: usize,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
    pub(crate) counts: Option<Arc<[usize]>>,
    pub(crate) of: Option<(TypeId, &'static str)>,
    pub(crate) site: Site,
}

impl Call {
    #[track_caller]
    pub(crate) fn new(op: &'static str) -> Self {
        let site = Location::caller();
        Call {
            origin: Origin::default(),
            op,
            dtype: None,
            count: 0,
            reduce: None,
            root: None,
            counts: None,
            of: None,
            site,
        }
    }

    pub(crate) fn from(self, origin: Origin) -> Self {
        Call { origin, ..self }
    }

    /// A call made there.
    pub(crate) fn at(op: &'static str, site: Site) -> Self {
        Call { site, ..Call::new(op) }
    }

    /// With what may be there.
    pub(crate) fn with(self, reduce: Option<ReduceOp>, root: Option<u32>) -> Self {
        Call { reduce, root: root.map(|root| root as usize), ..self }
    }

    /// Operation, call site, count, type and root of a call that has no more than these and a reduction.
    pub(crate) fn in_short(&self) -> Option<(&'static str, Site, usize, DType, Option<u32>)> {
        let nothing_else = self.counts.is_none() && self.of.is_none();
        let dtype = self.dtype.filter(|_| nothing_else)?;
        Some((self.op, self.site, self.count, dtype, self.root.map(|root| root as u32)))
    }

    pub(crate) fn reduction(&self) -> Option<ReduceOp> {
        self.reduce
    }

    pub(crate) fn elements(self, dtype: DType, count: usize) -> Self {
        Call { dtype: Some(dtype), count, ..self }
    }

    pub(crate) fn reducing(self, op: ReduceOp) -> Self {
        Call { reduce: Some(op), ..self }
    }

    pub(crate) fn root(self, root: usize) -> Self {
        Call { root: Some(root), ..self }
    }

    /// Elements of each member, which all members must give alike.
    pub(crate) fn counts(self, counts: &[usize]) -> Self {
        Call { counts: Some(counts.into()), ..self }
    }

    pub(crate) fn of_type<T: 'static>(self) -> Self {
        Call { of: Some((TypeId::of::<T>(), std::any::type_name::<T>())), count: size_of::<T>(), ..self }
    }

    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// What differs between what is sent and what is received.
    pub(crate) fn differs_in_elements(&self, other: &Call) -> Option<&'static str> {
        if self.dtype != other.dtype { Some("dtype") } else { (self.count != other.count).then_some("count") }
    }

    /// What differs, if anything does.
    pub(crate) fn differs(&self, other: &Call) -> Option<&'static str> {
        let reduces = match (self.reduce, other.reduce) {
            (Some(a), Some(b)) => a.matches(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        [
            (self.op != other.op, "operation"),
            (self.origin != other.origin, self.origin.differs(other.origin)),
            (self.dtype != other.dtype || self.of.map(|t| t.0) != other.of.map(|t| t.0), "dtype"),
            (self.count != other.count, "count"),
            (!reduces, "reduce op"),
            (self.root != other.root, "root"),
            (self.counts != other.counts, "counts"),
        ]
        .into_iter()
        .find_map(|(differs, what)| differs.then_some(what))
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}(", self.op)?;
        let mut between = "";
        let mut part = |f: &mut std::fmt::Formatter<'_>, text: std::fmt::Arguments<'_>| {
            write!(f, "{between}{text}")?;
            between = ", ";
            Ok(())
        };
        if let Some(dtype) = self.dtype {
            part(f, format_args!("{} x {dtype:?}", self.count))?;
        }
        if self.op == LAUNCH {
            part(f, format_args!("of {} collectives", self.count))?;
        }
        if let Some((_, of)) = self.of {
            part(f, format_args!("{of}"))?;
        }
        if let Some(reduce) = self.reduce {
            part(f, format_args!("{reduce:?}"))?;
        }
        if let Some(root) = self.root {
            part(f, format_args!("root {root}"))?;
        }
        if let Some(counts) = &self.counts {
            part(f, format_args!("counts {counts:?}"))?;
        }
        match self.origin {
            Origin(0) => f.write_str(")"),
            Origin::CAPTURE => f.write_str(") in a capture"),
            exchange if exchange.is_of_exchange() => {
                match exchange.0 & Origin::BUCKET {
                    0 => f.write_str(")")?,
                    bucket => write!(f, ") of bucket {}", bucket - 1)?,
                }
                write!(f, " in exchange {} of a GradientExchange", exchange.step())
            }
            _ => f.write_str(") of a graph"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Whatever the numbers are, no kind is taken for another.
    #[test]
    fn origins_are_told_apart() {
        let exchange = Origin::exchange(7, 3);
        let graph = Origin::graph(u64::MAX, u64::MAX).then(u64::MAX);
        let of = |origin: Origin| Call::new("all_reduce").from(origin);
        let pairs = [
            (exchange, Origin::exchange(7, 4), Some("exchange")),
            (exchange, Origin::exchange(8, 3).in_step(1), Some("exchange")),
            (exchange, Origin::default(), Some("exchange")),
            (exchange, graph, Some("exchange")),
            (exchange, Origin::CAPTURE, Some("capture")),
            (exchange.in_step(1), exchange.in_step(2), Some("step")),
            (exchange.in_step(2).in_step(0), exchange, None),
            (exchange.in_step(2).of_bucket(1), exchange.in_step(2), Some("bucket")),
            (exchange.in_step(2).of_bucket(1), exchange.in_step(1).of_bucket(1), Some("step")),
            (exchange.in_step(2).of_bucket(9).in_step(2), exchange.in_step(2), None),
            (graph, Origin::default(), Some("graph")),
        ];
        for (a, b, what) in pairs {
            assert_eq!((of(a).differs(&of(b)), of(b).differs(&of(a))), (what, what), "{a:?} {b:?}");
        }
        assert_eq!(of(exchange.in_step(5)).to_string(), "all_reduce() in exchange 5 of a GradientExchange");
        let bucket = exchange.in_step(5).of_bucket(0);
        assert_eq!(of(bucket).to_string(), "all_reduce() of bucket 0 in exchange 5 of a GradientExchange");
    }

    /// Of all that a process is likely to have.
    #[test]
    fn exchanges_have_numbers_of_their_own() {
        let places = (1..200u64).map(|place| place * 1009);
        let all: Vec<_> =
            places.flat_map(|place| (1..200).map(move |number| Origin::exchange(place, number).0)).collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }
}
