//! Settings of an exchange, and their builder. Invariant: an exchange exists only if all members' settings were equal.

use super::{Difference, GradientExchange, difference::mismatch, element::Gradient};
use crate::{
    DType, Device, Group, ReduceOp,
    error::{Error, Result, Site, op_site::OpSite},
    fabric::Origin,
};
use smallvec::{SmallVec, smallvec};
use std::{marker::PhantomData, sync::Arc};

/// The type in which gradients travel between devices: their own type, or a narrower one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// Their own type. The result has the bits of [`Device::all_reduce`].
    #[default]
    Same,
    /// `f32`: half the bytes of `f64`. Gradients are rounded to 24 bits before the exchange and again after it; values
    /// beyond 3.4e38 become infinite. For gradients of `f32` it is [`Same`](Self::Same).
    F32,
    /// `half::bf16`: half the bytes of `f32`. Gradients are rounded to 8 bits before the exchange and again after it,
    /// with `f32` between. It has the range of `f32` except at the very end: values beyond 3.39e38 become infinite.
    Bf16,
    /// `half::f16`: half the bytes of `f32`. Gradients are rounded to 11 bits twice; beyond 65504 they become infinite.
    F16,
}

impl Wire {
    /// The wire type for gradients of type `own`.
    pub(super) fn dtype(self, own: DType) -> DType {
        match self {
            Wire::Same => own,
            Wire::F32 => DType::F32,
            Wire::Bf16 => DType::BF16,
            Wire::F16 => DType::F16,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    pub bucket_bytes: usize,
    pub first_bucket_bytes: usize,
    pub reduce: ReduceOp,
    pub wire: Wire,
    pub norm: bool,
    pub find_unused: bool,
    pub ready_order: bool,
    pub scatter: bool,
    pub register: bool,
    pub priorities: SmallVec<[i32; 4]>,
}

/// Settings of a [`GradientExchange`], from [`GradientExchange::builder`]. All members must give the same.
#[derive(Clone, Debug)]
pub struct GradientExchangeBuilder<T = f32>(Settings, PhantomData<fn() -> T>);

macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty;)*) => {
        $($(#[$doc])* pub fn $field(mut self, $field: $type) -> Self {
            self.0.$field = $field;
            self
        })*
    };
}

impl<T: Gradient> GradientExchangeBuilder<T> {
    pub(super) fn new() -> Self {
        let settings = Settings {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            reduce: ReduceOp::Avg,
            wire: Wire::Same,
            norm: false,
            find_unused: true,
            ready_order: true,
            scatter: false,
            register: false,
            priorities: smallvec![-1],
        };
        GradientExchangeBuilder(settings, PhantomData)
    }

    /// The same settings for gradients of another type than `f32`.
    ///
    /// `GradientExchange::builder().of::<f64>()`, for example.
    pub fn of<U: Gradient>(self) -> GradientExchangeBuilder<U> {
        GradientExchangeBuilder(self.0, PhantomData)
    }

    setters! {
        /// A bucket is full when it has this many bytes of gradients (default: 25 MiB, as in DDP). A bucket that is too
        /// small costs a meeting and two launches for little; one that is too large waits for the end of the backward
        /// pass. On fast links larger is better (pytorch#118421).
        bucket_bytes: usize;

        /// Size of the first bucket (default: 1 MiB, as in DDP). It is small, so that the exchange begins early.
        first_bucket_bytes: usize;

        /// `Avg` (the default), `Sum`, or `Scaled`: the sum of each member's gradients times the member's own weight.
        /// For uneven batches the weight is the member's rows / all rows; `Avg` of means over uneven shards is biased.
        /// The weight given here holds until [`GradientExchange::set_weight`].
        reduce: ReduceOp;

        /// The type between devices (default: [`Wire::Same`]): the gradients' own, or a narrower one. `f64` may travel
        /// as `f32`, and `f32` as a half type.
        wire: Wire;

        /// Whether each exchange computes the norm of all gradients (default: no). See
        /// [`Exchanged::norm`](super::Exchanged::norm).
        norm: bool;

        /// Whether members tell each other at a step's end which gradients they had (default: yes), for
        /// [`Exchanged::unused`](super::Exchanged::unused). It costs one meeting of the host threads, some
        /// microseconds. Without it gradients that no member had are still zero. But members in different steps,
        /// because they [left out](GradientExchange::set_sync) different exchanges, are not detected after the first.
        find_unused: bool;

        /// Whether buckets are rebuilt after the first step, in the order in which gradients became ready on rank 0
        /// (default: yes, as in DDP). Before that, and otherwise, they follow the reverse order of the sizes given to
        /// [`build`](Self::build). Gradients move when buckets are rebuilt. Holders of their addresses, for example a
        /// graph captured in the first step, is out of date then ([`Exchanged::moved`](super::Exchanged::moved) tells).
        ready_order: bool;

        /// Whether a bucket is reduce-scattered instead of all-reduced (default: no): each member has the results of
        /// one [part](GradientExchange::part) of a bucket, and unspecified numbers elsewhere. For optimizers whose
        /// state is divided among the members (ZeRO-1). Parts must not move, and the norm is of whole buckets: so it
        /// needs [`ready_order(false)`](Self::ready_order), no [`norm`](Self::norm), and [`Wire::Same`]; nothing can
        /// be [lent](GradientExchange::lend).
        scatter: bool;
    }

    /// The priority of the stream that exchanges gradients, as in [`Device::stream_with_priority`] (default: -1, before
    /// the backward pass: an exchange has few blocks, and everything waits for it).
    pub fn priority(self, priority: i32) -> Self {
        self.bucket_priorities(&[priority])
    }

    /// A priority for each bucket. The last one holds for all further buckets; an empty list means 0. Example: `&[1,
    /// -1]`. The first bucket, whose gradients are needed last, makes room for the backward pass; the others run before
    /// it. A priority decides which kernels a device runs first. Buckets start in the order of their numbers in any
    /// case, since members must agree on that.
    pub fn bucket_priorities(mut self, priorities: &[i32]) -> Self {
        self.0.priorities = priorities.into();
        self
    }

    /// Makes this device's part of the exchange, for gradients with these numbers of elements. All members of the gang
    /// call it. Give the sizes in the order in which the forward pass uses the parameters, as far as it is known.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on all members when they differ in type, settings or sizes, naming the first difference;
    /// [`Error::InvalidArgument`] for other operations than those of [`reduce`](Self::reduce), weights that are not
    /// finite, a wire that is not narrower than the gradients, and empty buckets; [`Error::OutOfMemory`],
    /// [`Error::Aborted`], [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn build(&self, dev: &Device, sizes: &[usize]) -> Result<GradientExchange<T>> {
        let _here = OpSite::here("build");
        self.build_in(&dev.everyone(), sizes)
    }

    /// [`build`](Self::build) for a group: only its members meet, and averages are over the group. In later scopes the
    /// exchange works in any gang that contains the members. The page "Gradients" of the guide has an example.
    ///
    /// # Errors
    /// As of [`build`](Self::build).
    #[track_caller]
    pub fn build_in(&self, group: &Group<'_>, sizes: &[usize]) -> Result<GradientExchange<T>> {
        let _here = OpSite::here("build_in");
        self.0.check::<T>()?;
        let id = group.new_exchange();
        let settings = Settings { register: group.device().worker.shared.register_buckets, ..self.0.clone() };
        let terms =
            Terms { id, dtype: T::DTYPE, settings: settings.clone(), sizes: sizes.into(), site: OpSite::place() };
        let (terms_of_all, here) = (terms.to_string(), group.here());
        let all = here.exchange(terms)?;
        let (first, others) = all.split_first().expect("this member at least");
        for (rank, other) in (1..).zip(others) {
            if let Some(difference) = first.differs(other) {
                return Err(mismatch(&here, rank, difference, [first.site, other.site]));
            }
        }
        group.agree(Origin::default(), "GradientExchange", first.site, &terms_of_all)?;
        GradientExchange::new(group, first.id, settings, sizes)
    }
}

impl Settings {
    #[track_caller]
    fn check<T: Gradient>(&self) -> Result<()> {
        const OP: &str = "GradientExchange";
        match self.reduce {
            ReduceOp::Sum | ReduceOp::Avg => {}
            ReduceOp::Scaled(weight) => check_weight::<T>(OP, weight)?,
            other => return Err(Error::invalid(OP, format_args!("{other} of gradients: Sum, Avg or Scaled"))),
        }
        let (wire, own) = (self.wire.dtype(T::DTYPE), T::DTYPE);
        invalid_if!(T::kernels(wire).is_none(), OP, "a wire of {:?} is no use to gradients of {own:?}", self.wire);
        let cut = self.scatter && (self.ready_order || self.norm || wire != own);
        invalid_if!(cut, OP, "buckets that are scattered need `ready_order(false)`, `norm(false)` and `Wire::Same`");
        invalid_if!(self.bucket_bytes.min(self.first_bucket_bytes) == 0, OP, "a bucket of 0 bytes");
        Ok(())
    }

    pub fn bucket_sizes(&self) -> (usize, usize) {
        (self.first_bucket_bytes, self.bucket_bytes)
    }

    pub fn priority(&self, bucket: usize) -> i32 {
        self.priorities.get(bucket).or(self.priorities.last()).copied().unwrap_or(0)
    }
}

pub(super) fn check_weight<T: Gradient>(op: &'static str, weight: f64) -> Result<()> {
    // Beyond the range of f32 the weight would become infinite, and zero gradients times it NaN.
    invalid_if!(T::factor(weight).is_none(), op, "a weight of {weight}");
    Ok(())
}

#[derive(Clone)]
struct Terms {
    /// The identity of the exchange; that of the first member counts.
    id: Origin,
    dtype: DType,
    settings: Settings,
    sizes: Arc<[usize]>,
    site: Site,
}

// The values that other processes must have alike, in words.
display_as!(Terms, |self, f| {
    // Each member has a weight of its own.
    let reduce = match self.settings.reduce {
        ReduceOp::Scaled(_) => ReduceOp::Scaled(1.0),
        reduce => reduce,
    };
    let settings = Settings { reduce, ..self.settings.clone() };
    write!(f, "GradientExchange({:?}, {settings:?}, {:?})", self.dtype, self.sizes)
});

impl Terms {
    fn differs(&self, other: &Terms) -> Option<Difference> {
        let both = |what, text: &dyn Fn(&Terms) -> String| {
            let call = |terms| format!("GradientExchange({})", text(terms));
            Some((what, call(self), call(other)))
        };
        if self.dtype != other.dtype {
            return both("dtype", &|terms| format!("{:?}", terms.dtype));
        }
        if self.sizes.len() != other.sizes.len() {
            return both("count", &|terms| format!("{} gradients", terms.sizes.len()));
        }
        if let Some(i) = (0..self.sizes.len()).find(|&i| self.sizes[i] != other.sizes[i]) {
            return both("size", &|terms| format!("gradient {i} of {} elements", terms.sizes[i]));
        }
        let (a, b) = (&self.settings, &other.settings);
        if a.reduce.kind() != b.reduce.kind() {
            return both("reduce op", &|terms| terms.settings.reduce.to_string());
        }
        // Each member has a weight of its own.
        let rest = Settings { reduce: a.reduce, ..b.clone() };
        if *a != rest { both("settings", &|terms| format!("{:?}", terms.settings)) } else { None }
    }
}
