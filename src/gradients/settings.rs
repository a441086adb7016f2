//! How gradients are to be exchanged, and whether all members say the same.

use super::GradientExchange;
use crate::{
    Device, ReduceOp,
    error::{Error, Result, Site},
};
use smallvec::{SmallVec, smallvec};
use std::{panic::Location, sync::Arc};

/// What gradients are while they are between devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// `f32`, as they are. The result has the bits of [`Device::all_reduce`].
    #[default]
    Same,
    /// `half::bf16`: half the bytes. Rounded to 8 bits before the exchange and again behind it, with `f32` between. It has the range
    /// of `f32` but for its very end: what is beyond 3.39e38 becomes infinite.
    Bf16,
    /// `half::f16`: half the bytes. Rounded to 11 bits twice; what is beyond 65504 becomes infinite.
    F16,
}

/// Plain numbers: the same on all members.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    pub bucket_bytes: usize,
    pub first_bucket_bytes: usize,
    pub reduce: ReduceOp,
    pub wire: Wire,
    pub norm: bool,
    pub find_unused: bool,
    pub ready_order: bool,
    pub priorities: SmallVec<[i32; 4]>,
}

/// Settings of a [`GradientExchange`], from [`GradientExchange::builder`]. All members give the same.
#[derive(Clone, Debug)]
pub struct GradientExchangeBuilder(Settings);

impl GradientExchangeBuilder {
    pub(super) fn new() -> Self {
        GradientExchangeBuilder(Settings {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            reduce: ReduceOp::Avg,
            wire: Wire::Same,
            norm: false,
            find_unused: true,
            ready_order: true,
            priorities: smallvec![-1],
        })
    }

    /// A bucket is full when it has so many bytes of `f32` (default: 25 MiB, as in DDP). One that is too small costs a meeting
    /// and two launches for little; one that is too large waits for the end of the backward pass. On fast links more is
    /// better (pytorch#118421).
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.0.bucket_bytes = bytes;
        self
    }

    /// The same of the first bucket (default: 1 MiB, as in DDP), which is small so that the exchange begins early.
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.0.first_bucket_bytes = bytes;
        self
    }

    /// `Avg` (the default), `Sum`, or `Scaled`: the sum of each member's gradients times a weight of its own, for uneven batches:
    /// its rows / all rows. `Avg` of means over uneven shards is biased.
    /// The weight given here is the one of the steps before [`GradientExchange::set_weight`].
    pub fn reduce(mut self, op: ReduceOp) -> Self {
        self.0.reduce = op;
        self
    }

    /// The type between devices (default: [`Wire::Same`]).
    pub fn wire(mut self, wire: Wire) -> Self {
        self.0.wire = wire;
        self
    }

    /// Whether each exchange leaves the norm of all gradients (default: no). See [`Exchanged::norm`](super::Exchanged::norm).
    pub fn norm(mut self, norm: bool) -> Self {
        self.0.norm = norm;
        self
    }

    /// Whether members tell each other at the end of a step which gradients they had (default: yes), so that
    /// [`Exchanged::unused`](super::Exchanged::unused) knows what nobody had. It is one meeting of the hosts, some microseconds.
    /// Without it, gradients that nobody had are zeros all the same; but members that are not in the same step, since they
    /// [left out](GradientExchange::set_sync) different exchanges, are not found out after the first.
    pub fn find_unused(mut self, find: bool) -> Self {
        self.0.find_unused = find;
        self
    }

    /// Whether, after the first step, buckets are made anew in the order in which gradients became ready on rank 0 (default:
    /// yes, as in DDP). Before, and otherwise, they are in the reverse of the order in which sizes are given to
    /// [`build`](Self::build). Gradients move when that happens: what holds their addresses, a graph that was captured in the
    /// first step say, does not fit any more ([`Exchanged::moved`](super::Exchanged::moved) tells).
    pub fn ready_order(mut self, follow: bool) -> Self {
        self.0.ready_order = follow;
        self
    }

    /// The priority of the stream on which gradients are exchanged, as of [`Device::stream_with_priority`] (default: -1, before
    /// the backward pass: an exchange has few blocks, and everybody waits for it).
    pub fn priority(self, priority: i32) -> Self {
        self.bucket_priorities(&[priority])
    }

    /// A priority for each bucket; the last is that of all further ones too, and none at all is 0. Say `&[1, -1]`: the first bucket, whose gradients
    /// are needed last, makes room for the backward pass, and the others go before it. A priority decides which kernels a
    /// device runs first; buckets start in the order of their numbers in any case, since members must agree on that.
    pub fn bucket_priorities(mut self, priorities: &[i32]) -> Self {
        self.0.priorities = priorities.into();
        self
    }

    /// Makes this device's part of the exchange, for gradients of so many elements each. All members call it; the order of the
    /// sizes is the one in which the forward pass uses the parameters, as far as it is known.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on all members when they differ in settings or sizes, naming the first difference;
    /// [`Error::InvalidArgument`] for other operations than those of [`reduce`](Self::reduce), weights that are not finite, and
    /// empty buckets; [`Error::OutOfMemory`], [`Error::Aborted`], [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn build(&self, dev: &Device, sizes: &[usize]) -> Result<GradientExchange> {
        self.0.check()?;
        let terms = Terms { settings: self.0.clone(), sizes: sizes.into(), site: Location::caller() };
        let all = dev.exchange(terms)?;
        let (first, others) = all.split_first().expect("this member at least");
        for (rank, other) in (1..).zip(others) {
            if let Some((what, a_call, b_call)) = first.differs(other) {
                let gang = &dev.session.gang;
                let (a, b) = (gang.device(0), gang.device(rank));
                return Err(Error::Mismatch { what, a, a_call, a_site: first.site, b, b_call, b_site: other.site });
            }
        }
        GradientExchange::new(dev, self.0.clone(), sizes)
    }
}

impl Settings {
    fn check(&self) -> Result<()> {
        const OP: &str = "GradientExchange";
        match self.reduce {
            ReduceOp::Sum | ReduceOp::Avg => {}
            ReduceOp::Scaled(weight) => check_weight(OP, weight)?,
            other => return Err(Error::invalid(OP, format_args!("{other} of gradients: Sum, Avg or Scaled"))),
        }
        match self.bucket_bytes.min(self.first_bucket_bytes) {
            0 => Err(Error::invalid(OP, "a bucket of 0 bytes")),
            _ => Ok(()),
        }
    }

    /// The priority of a bucket.
    pub fn priority(&self, bucket: usize) -> i32 {
        self.priorities.get(bucket).or(self.priorities.last()).copied().unwrap_or(0)
    }
}

pub(super) fn check_weight(op: &'static str, weight: f64) -> Result<()> {
    // Beyond f32 it would become infinite, and zeros times that are no zeros.
    if (weight as f32).is_finite() { Ok(()) } else { Err(Error::invalid(op, format_args!("a weight of {weight}"))) }
}

/// What a member brings to [`GradientExchangeBuilder::build`].
#[derive(Clone)]
struct Terms {
    settings: Settings,
    sizes: Arc<[usize]>,
    site: Site,
}

impl Terms {
    /// What differs, and both sides of it.
    fn differs(&self, other: &Terms) -> Option<(&'static str, String, String)> {
        let both = |what, text: &dyn Fn(&Terms) -> String| {
            let call = |terms| format!("GradientExchange({})", text(terms));
            Some((what, call(self), call(other)))
        };
        if self.sizes.len() != other.sizes.len() {
            return both("count", &|terms| format!("{} gradients", terms.sizes.len()));
        }
        if let Some(i) = (0..self.sizes.len()).find(|&i| self.sizes[i] != other.sizes[i]) {
            return both("size", &|terms| format!("gradient {i} of {} elements", terms.sizes[i]));
        }
        let (a, b) = (&self.settings, &other.settings);
        if !a.reduce.matches(b.reduce) {
            return both("reduce op", &|terms| terms.settings.reduce.to_string());
        }
        // Each has a weight of its own.
        let rest = Settings { reduce: a.reduce, ..b.clone() };
        if *a != rest { both("settings", &|terms| format!("{:?}", terms.settings)) } else { None }
    }
}
