//! A call of a collective, as the meeting compares it and reports show it.
//!
//! Invariant: [`Origin`]s of different kinds are different numbers, so members that disagree on the kind find out.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use super::{DType, ReduceOp};
use crate::error::{Site, op_site::OpSite};
use std::{any::TypeId, sync::Arc};

/// The operation that launches a graph's collectives together.
pub(crate) const LAUNCH: &str = "launch_graph";

/// Where a call comes from: the program, a capture, a graph, or a gradient exchange. Members must agree on it, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    pub(crate) const CAPTURE: Origin = Origin(1);

    /// Of calls from the graph whose first collective was call `number` in the gang at `place`: no other has this pair.
    pub fn graph(place: u64, number: u64) -> Self {
        Origin((place.rotate_left(32) ^ number) & !Self::EXCHANGE)
    }

    /// Adds a further collective of the graph (a step of FNV-1a). Without it, graphs that were captured inside each
    /// other could have one origin.
    pub fn then(self, number: u64) -> Self {
        Origin((self.0 ^ number).wrapping_mul(0x0000_0100_0000_01b3) & !Self::EXCHANGE)
    }

    /// Set in origins of gradient exchanges alone. Below are 39 bits for the exchange, then its step and the bucket.
    const EXCHANGE: u64 = 1 << 63;
    const STEP: u64 = (1 << 24) - 1;
    const BUCKETS: u32 = 10;
    const BUCKET: u64 = (1 << Self::BUCKETS) - 1;

    /// Of the gradient exchange made with call `number` in the gang at `place`. Hashed to fit a compact descriptor.
    pub fn exchange(place: u64, number: u64) -> Self {
        let mixed = (place.rotate_left(32) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Origin(Self::EXCHANGE | ((mixed >> 1) & !Self::STEP))
    }

    pub fn in_step(self, step: u64) -> Self {
        Origin((self.0 & !Self::STEP) | (step << Self::BUCKETS & Self::STEP))
    }

    /// Of a bucket in that step. Buckets of one length may have different algorithms.
    pub fn of_bucket(self, bucket: usize) -> Self {
        // 0: no bucket.
        Origin((self.0 & !Self::BUCKET) | (1 + bucket as u64 % Self::BUCKET))
    }

    pub fn bits(self) -> u64 {
        self.0
    }

    pub fn of_bits(bits: u64) -> Self {
        Origin(bits)
    }

    fn step(self) -> u64 {
        (self.0 & Self::STEP) >> Self::BUCKETS
    }

    fn is_of_exchange(self) -> bool {
        self.0 & Self::EXCHANGE != 0
    }

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

/// The norm of rows that follows a sum in one call: its kind, the length of a row and `eps`, in one number. 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThenNorm(u64);

impl ThenNorm {
    const LAYER: u64 = 1 << 63;

    /// Rows of 1 to 2^31 - 1 elements. An `eps` of 64 bits is told as 32.
    pub fn new(cols: usize, layer: bool, eps: f32) -> Self {
        debug_assert!((1..1 << 31).contains(&cols));
        ThenNorm((if layer { Self::LAYER } else { 0 }) | (cols as u64) << 32 | u64::from(eps.to_bits()))
    }

    pub fn bits(self) -> u64 {
        self.0
    }

    pub fn of_bits(bits: u64) -> Self {
        ThenNorm(bits)
    }
}

display_as!(ThenNorm, |self, f| {
    let kind = if self.0 & Self::LAYER == 0 { "RMS" } else { "layer" };
    let (cols, eps) = ((self.0 & !Self::LAYER) >> 32, f32::from_bits(self.0 as u32));
    write!(f, "{kind} norm of rows of {cols}, eps {eps:e}")
});

/// A member's call.
#[derive(Clone)]
pub struct Call {
    pub origin: Origin,
    pub op: &'static str,
    pub dtype: Option<DType>,
    pub(crate) count: usize,
    pub reduce: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
    pub(crate) counts: Option<Arc<[usize]>>,
    pub(crate) norm: ThenNorm,
    pub of: Option<(TypeId, &'static str)>,
    pub site: Site,
}

impl Call {
    #[track_caller]
    pub fn new(op: &'static str) -> Self {
        Call::at(op, OpSite::place())
    }

    /// A call that was made at `site`: also a peer's.
    pub fn at(op: &'static str, site: Site) -> Self {
        let (origin, norm) = (Origin::default(), ThenNorm::default());
        Call { origin, op, dtype: None, count: 0, reduce: None, root: None, counts: None, norm, of: None, site }
    }

    pub fn of_type<T: 'static>(self) -> Self {
        Call { of: Some((TypeId::of::<T>(), std::any::type_name::<T>())), count: size_of::<T>(), ..self }
    }

    /// The part in which a sender's and a receiver's elements differ.
    pub fn differs_in_elements(&self, other: &Call) -> Option<&'static str> {
        if self.dtype != other.dtype { Some("dtype") } else { (self.count != other.count).then_some("count") }
    }

    /// The first part in which two calls differ, if they do.
    pub fn differs(&self, other: &Call) -> Option<&'static str> {
        [
            (self.op != other.op, "operation"),
            (self.origin != other.origin, self.origin.differs(other.origin)),
            (self.dtype != other.dtype || self.of.map(|t| t.0) != other.of.map(|t| t.0), "dtype"),
            (self.count != other.count, "count"),
            (self.reduce.map(ReduceOp::kind) != other.reduce.map(ReduceOp::kind), "reduce op"),
            (self.root != other.root, "root"),
            (self.counts != other.counts, "counts"),
            (self.norm != other.norm, "norm"),
        ]
        .into_iter()
        .find_map(|(differs, what)| differs.then_some(what))
    }
}

setters! { Call;
    pub fn from(self, origin: Origin) { self.origin = origin; }
    pub fn with(self, reduce: Option<ReduceOp>, root: Option<u32>) {
        self.reduce = reduce;
        self.root = root.map(|root| root as usize);
    }
    pub fn elements(self, dtype: DType, count: usize) {
        self.dtype = Some(dtype);
        self.count = count;
    }
    pub fn reducing(self, op: ReduceOp) { self.reduce = Some(op); }
    pub fn root(self, root: usize) { self.root = Some(root); }

    /// Elements of each member. All members must give the same ones.
    pub fn counts(self, counts: &[usize]) { self.counts = Some(counts.into()); }

    /// A sum that a norm follows. All members must give the same norm.
    pub fn norm(self, norm: ThenNorm) { self.norm = norm; }
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
        if self.norm != ThenNorm::default() {
            part(f, format_args!("{}", self.norm))?;
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
#[path = "../../tests/unit/fabric/call_tests.rs"]
mod tests;
