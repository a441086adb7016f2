//! Optimizers and learning rates as plain data: which numbers a step of the device code gets.
//!
//! The formulas and the defaults are PyTorch's (`torch.optim`, 2.x); `kernels/optimizer.cu` has them.

use crate::runtime::ErrorInternals;
use crate::update::{ADAM, MOMENTUM, Rule};
use gpu_pool::{Error, Result};
use std::ops::Range;

/// How parameters follow from gradients: plain data.
///
/// ```
/// use gpu_pool_train::{LearningRate, Optimizer};
/// let sgd = Optimizer::sgd(0.1).momentum(0.9).nesterov();
/// let adam_w = Optimizer::adam_w(3e-4)
///     .decay(0.1)
///     .clip(1.0)
///     .warm_up(100)
///     .schedule(LearningRate::Cosine { steps: 10_000, end: 0.1 });
/// assert!((adam_w.rate_at(49) - 1.5e-4).abs() < 1e-12);
/// ```
///
/// All arithmetic is in `f32`. Parameters of half types have a copy in `f32`, which small steps do not get lost in.
///
/// Wrong settings are errors of [`DataParallel::new`](super::DataParallel::new), not of the methods here. Numbers must
/// be finite in `f32`, and those greater than 0 also there. A schedule that raises the rate beyond `f32` ends with an
/// error of the step that would use it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "settings return a changed optimizer"]
pub struct Optimizer {
    kind: Kind,
    rate: f64,
    schedule: LearningRate,
    warm_up: u64,
    decay: f64,
    pub(super) clip: Option<f64>,
    pub(super) sharded: bool,
    pub(super) bucket_bytes: usize,
    /// A setting that this kind does not have.
    misplaced: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Stochastic gradient descent.
    Sgd { momentum: f64, dampening: f64, nesterov: bool },
    /// Adam; with `decoupled` decay AdamW.
    Adam { betas: (f64, f64), eps: f64, decoupled: bool },
}

/// The optimizer with a setting of one kind; on another kind it is misplaced, for the reason given.
macro_rules! set {
    ($this:ident, $Kind:ident { $field:ident } = $value:expr, $why:literal) => {{
        let (mut changed, value) = ($this, $value);
        match &mut changed.kind {
            Kind::$Kind { $field, .. } => *$field = value,
            _ => changed.misplaced = Some($why),
        }
        changed
    }};
}

/// Steps that are counted: so many are exact in the `f64` of schedules.
const MOST_STEPS: u64 = 1 << 53;

/// The memory of an optimizer for each element: moments, and the parameter in `f32` if its type is narrower.
pub(super) const KINDS: [&str; 3] = ["first", "second", "master"];

impl Optimizer {
    /// Stochastic gradient descent: `w -= rate * g`. `torch.optim.SGD(lr)`.
    pub fn sgd(rate: f64) -> Self {
        Optimizer::new(rate, Kind::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false })
    }

    /// Adam (Kingma and Ba, 2015), with betas 0.9 and 0.999, eps 1e-8, no decay. `torch.optim.Adam(lr)`.
    pub fn adam(rate: f64) -> Self {
        Optimizer::new(rate, Kind::Adam { betas: (0.9, 0.999), eps: 1e-8, decoupled: false })
    }

    /// AdamW (Loshchilov and Hutter, 2019): [`adam`](Self::adam) whose decay, 0.01, is not part of the gradient.
    /// `torch.optim.AdamW(lr)`.
    pub fn adam_w(rate: f64) -> Self {
        Optimizer::new(rate, Kind::Adam { betas: (0.9, 0.999), eps: 1e-8, decoupled: true }).decay(0.01)
    }

    fn new(rate: f64, kind: Kind) -> Self {
        Optimizer {
            kind,
            rate,
            schedule: LearningRate::Constant,
            warm_up: 0,
            decay: 0.0,
            clip: None,
            sharded: false,
            bucket_bytes: 25 << 20,
            misplaced: None,
        }
    }

    /// Momentum (SGD): `m = momentum * m + (1 - dampening) * g; w -= rate * m`; the first `m` is `g`.
    pub fn momentum(self, momentum: f64) -> Self {
        set!(self, Sgd { momentum } = momentum, "Adam has no `momentum`; see `betas`")
    }

    /// Dampening of the momentum (SGD; default 0).
    pub fn dampening(self, dampening: f64) -> Self {
        set!(self, Sgd { dampening } = dampening, "Adam has no `dampening`")
    }

    /// Nesterov's momentum (SGD): `w -= rate * (g + momentum * m)`.
    pub fn nesterov(self) -> Self {
        set!(self, Sgd { nesterov } = true, "Adam has no `nesterov`")
    }

    /// The factors of the moments (Adam; default 0.9 and 0.999).
    pub fn betas(self, first: f64, second: f64) -> Self {
        set!(self, Adam { betas } = (first, second), "SGD has no `betas`; see `momentum`")
    }

    /// The term that is added to the root of the second moment (Adam; default 1e-8). It is greater than 0, also as an
    /// `f32`: parameters without gradients would become NaN.
    pub fn eps(self, eps: f64) -> Self {
        set!(self, Adam { eps } = eps, "SGD has no `eps`")
    }

    /// The learning rate of a step, counted from 0.
    pub fn rate_at(&self, step: u64) -> f64 {
        let factor = match step.checked_sub(self.warm_up) {
            None => (step + 1) as f64 / self.warm_up as f64,
            Some(step) => self.schedule.factor(step),
        };
        self.rate * factor
    }

    pub(super) fn set_rate(&mut self, rate: f64) -> Result<()> {
        let changed = Optimizer { rate, ..*self };
        changed.check()?;
        *self = changed;
        Ok(())
    }

    /// Which of the [`KINDS`] it keeps, for parameters of type `T`.
    pub(super) fn keeps<T>(&self) -> [bool; 3] {
        let (first, second) = match self.kind {
            Kind::Sgd { momentum, .. } => (momentum != 0.0, false),
            Kind::Adam { .. } => (true, true),
        };
        [first, second, size_of::<T>() < size_of::<f32>()]
    }

    #[track_caller]
    pub(super) fn check(&self) -> Result<()> {
        // Steps are computed in `f32`: there a number neither becomes infinite, nor 0 without being 0.
        let above_zero = |x: f64| x as f32 > 0.0 && (x as f32).is_finite();
        let rate = |x: f64| x == 0.0 || above_zero(x);
        let fraction = |x: f64| (0.0..1.0).contains(&x);
        let right = match self.kind {
            Kind::Sgd { nesterov: true, momentum, dampening } if momentum == 0.0 || dampening != 0.0 => {
                return Err(Error::invalid("Optimizer", "Nesterov's momentum needs a momentum and no dampening"));
            }
            Kind::Sgd { momentum, dampening, .. } => rate(momentum) && (dampening as f32).is_finite(),
            // With an `eps` of 0 a parameter without gradients would become 0 / 0.
            Kind::Adam { betas, eps, .. } => fraction(betas.0) && fraction(betas.1) && above_zero(eps),
        };
        if let Some(why) = self.misplaced {
            return Err(Error::invalid("Optimizer", why));
        }
        let rates = rate(self.rate) && rate(self.decay) && self.schedule.is_right();
        let right = right && rates && self.clip.is_none_or(above_zero);
        invalid_if!(!right, "Optimizer", "a number is out of its range: {self:?}");
        self.check_step(0)
    }

    /// `Err` unless the step after so many can be counted and its numbers are finite in `f32`: a schedule may raise the
    /// rate without end. All devices call it with the same steps.
    #[track_caller]
    pub(super) fn check_step(&self, steps: u64) -> Result<()> {
        invalid_if!(steps > MOST_STEPS, "Optimizer", "{steps} steps: at most 2^53 can be counted");
        let Rule { decay, shrink, beta1, rest1, beta2, rest2, rate, root, eps, .. } = self.rule(steps);
        let finite = [decay, shrink, beta1, rest1, beta2, rest2, rate, root, eps].iter().all(|x| x.is_finite());
        let (rate, why) = (self.rate_at(steps), "the step's numbers are not finite in f32");
        invalid_if!(!finite, "Optimizer", "the rate of step {steps} is {rate:e}: {why}: {self:?}");
        Ok(())
    }

    /// [`check_step`](Self::check_step) of many steps: the numbers rise or fall to the end of the warm-up, and from
    /// there to the last step, so the steps at both ends stand for those between.
    #[track_caller]
    pub(super) fn check_steps(&self, steps: Range<u64>) -> Result<()> {
        let ends = [steps.start, self.warm_up.saturating_sub(1), self.warm_up, steps.end.saturating_sub(1)];
        ends.into_iter().filter(|step| steps.contains(step)).try_for_each(|step| self.check_step(step))
    }

    pub(super) fn rule(&self, steps: u64) -> Rule {
        let rate = self.rate_at(steps);
        let plain = Rule {
            most: self.clip.unwrap_or(0.0) as f32,
            decay: self.decay as f32,
            rate: rate as f32,
            ..Rule::plain()
        };
        match self.kind {
            Kind::Sgd { momentum: 0.0, .. } => plain,
            Kind::Sgd { momentum, dampening, nesterov } => {
                let rest = if steps == 0 { 1.0 } else { 1.0 - dampening };
                let (beta1, rest1) = (momentum as f32, rest as f32);
                Rule { kind: MOMENTUM, nesterov: nesterov.into(), beta1, rest1, ..plain }
            }
            Kind::Adam { betas: (first, second), eps, decoupled } => {
                let left = |beta: f64| 1.0 - beta.powf((steps + 1) as f64);
                let decay = if decoupled { 0.0 } else { self.decay };
                let shrink = if decoupled { 1.0 - rate * self.decay } else { 1.0 };
                Rule {
                    kind: ADAM,
                    decay: decay as f32,
                    shrink: shrink as f32,
                    beta1: first as f32,
                    rest1: (1.0 - first) as f32,
                    beta2: second as f32,
                    rest2: (1.0 - second) as f32,
                    rate: (rate / left(first)) as f32,
                    root: left(second).sqrt() as f32,
                    eps: eps as f32,
                    ..plain
                }
            }
        }
    }
}

setters! { Optimizer;
    /// Weight decay, of all parameters: `g += decay * w` (SGD, Adam), or `w -= rate * decay * w` (AdamW).
    pub fn decay(self, decay: f64) { self.decay = decay; }

    /// Gradients whose norm, over all parameters of a group, is above `norm` are scaled down to it before the step:
    /// `torch.nn.utils.clip_grad_norm_`, but without a pass of its own.
    pub fn clip(self, norm: f64) { self.clip = Some(norm); }

    /// How the learning rate changes (default: [`Constant`](LearningRate::Constant)). After the
    /// [`warm_up`](Self::warm_up) it begins at its step 0.
    pub fn schedule(self, schedule: LearningRate) { self.schedule = schedule; }

    /// The rate of the first `steps` steps rises by equal amounts: step `t` has `(t + 1) / steps` of it.
    pub fn warm_up(self, steps: u64) { self.warm_up = steps; }

    /// ZeRO-1 (Rajbhandari et al., 2020): each of `N` devices keeps the moments, and the copies in `f32` of half types,
    /// of one `N`-th of the parameters. Gradients are reduce-scattered, and new parameters gathered. The result has the
    /// same bits: sums of gradients are in the order of ranks both ways (an all-reduce is, unless it goes
    /// [around a ring](gpu_pool::collective::ReduceOrder)).
    ///
    /// Buckets are reduce-scattered beside the backward pass. Where devices reach each other's memory, one kernel of
    /// each does the rest: it exchanges the sums of squares, clips, updates its part of all buckets, and writes new
    /// parameters to all devices. Elsewhere (software GPUs, devices without peer access, several processes, or a wish
    /// for an [algorithm](gpu_pool::collective::Algorithm)) it is separate calls for each bucket, with the same bits.
    pub fn sharded(self) { self.sharded = true; }

    /// Bytes of gradients that are exchanged, and updated, together: see
    /// [`GradientExchangeBuilder::bucket_bytes`](gpu_pool::gradients::GradientExchangeBuilder::bucket_bytes) (default:
    /// 25 MiB).
    pub fn bucket_bytes(self, bytes: usize) { self.bucket_bytes = bytes; }
}

/// How a learning rate changes from step to step: a factor for each step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum LearningRate {
    /// 1.
    Constant,
    /// `factor ^ (step / every)`, rounded down: `StepLR`.
    Step {
        /// Steps between changes.
        every: u64,
        /// The factor of the rate.
        factor: f64,
    },
    /// `factor ^ step`: `ExponentialLR`.
    Exponential {
        /// The factor of the rate at each step.
        factor: f64,
    },
    /// From 1 to `end` along a line, and then `end`: `LinearLR`.
    Linear {
        /// Steps until `end`.
        steps: u64,
        /// The last factor.
        end: f64,
    },
    /// From 1 to `end` along half a cosine, and then `end`: `CosineAnnealingLR` (Loshchilov and Hutter, 2017).
    Cosine {
        /// Steps until `end`.
        steps: u64,
        /// The last factor.
        end: f64,
    },
}

impl LearningRate {
    /// The factor of a step, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        let part = |steps: u64| step.min(steps) as f64 / steps as f64;
        match *self {
            LearningRate::Constant => 1.0,
            LearningRate::Step { every, factor } => factor.powf((step / every.max(1)) as f64),
            LearningRate::Exponential { factor } => factor.powf(step as f64),
            LearningRate::Linear { steps, end } => 1.0 + (end - 1.0) * part(steps.max(1)),
            LearningRate::Cosine { steps, end } => {
                end + (1.0 - end) * (1.0 + (std::f64::consts::PI * part(steps.max(1))).cos()) / 2.0
            }
        }
    }

    fn is_right(&self) -> bool {
        let (steps, factor) = match *self {
            LearningRate::Constant => (1, 1.0),
            LearningRate::Exponential { factor } => (1, factor),
            LearningRate::Step { every: steps, factor } => (steps, factor),
            LearningRate::Linear { steps, end } | LearningRate::Cosine { steps, end } => (steps, end),
        };
        steps > 0 && factor.is_finite() && factor >= 0.0
    }
}

#[cfg(test)]
#[path = "../tests/unit/optim_tests.rs"]
mod tests;
