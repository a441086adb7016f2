//! [`Error`]: failures of this crate, of gpu-pool and of candle, which pass through each other's calls without a loss.

/// A failure. `?` makes it of gpu-pool's and of candle's errors, and makes either of it.
///
/// In a backward pass it travels through candle: [`From<candle_core::Error>`](Self#impl-From<Error>-for-Error) finds
/// the error of gpu-pool inside. So a device that was stopped by another one's failure still says
/// [`gpu_pool::Error::Aborted`], and the scope returns the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Of gpu-pool.
    #[error(transparent)]
    Pool(#[from] gpu_pool::Error),
    /// Of candle.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// An operation over devices was called on a thread, or at a time, without a device.
    #[error("{op}: no device here; call it on a device's thread, within `enter`{also}")]
    NoDevice {
        /// The operation.
        op: &'static str,
        /// A further condition.
        also: &'static str,
    },
    /// Weights that this step has taken from its [`VarBuilder`](candle_nn::VarBuilder), but that the backward pass has
    /// not reached. The fused operations of `candle_nn::ops` (`rms_norm`, `layer_norm`, `softmax_last_dim`) and
    /// `candle_nn::rotary_emb` have no backward pass, and end it silently.
    #[error(
        "no gradient for {}: the loss does not depend on them, or an operation without a backward pass is in between \
         (fused rms_norm, softmax_last_dim, rope); leave them out of the step, or see `may_lack_gradients`",
        .names.join(", ")
    )]
    NoGradient {
        /// Their names.
        names: Vec<String>,
    },
    /// A weight got a gradient that was not exchanged: the loss uses the variable itself, not the tensor that the
    /// step's [`VarBuilder`](candle_nn::VarBuilder) gives.
    #[error("{name} is used beside the step's VarBuilder, so its gradient is not exchanged")]
    Untapped {
        /// The weight's name.
        name: String,
    },
    /// Devices have different models.
    #[error("the models differ: device {} has {}, device {} has {}", .ranks[0], .has[0], .ranks[1], .has[1])]
    ModelsDiffer {
        /// Two ranks.
        ranks: [usize; 2],
        /// The first weight in which they differ, on each: its name, type and shape.
        has: [String; 2],
    },
    /// A type of elements that this call does not take.
    #[error("{op}: {what} has elements of {dtype:?}, {wanted}")]
    DType {
        /// The call.
        op: &'static str,
        /// The tensor or weight.
        what: String,
        /// Its type.
        dtype: candle_core::DType,
        /// The types that would do.
        wanted: String,
    },
    /// A tensor that is not here: on another device, or not in one piece of memory.
    #[error("{op}: {why}")]
    Invalid {
        /// The call.
        op: &'static str,
        /// The reason.
        why: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn invalid(op: &'static str, why: impl ToString) -> Self {
        Error::Invalid { op, why: why.to_string() }
    }

    /// Elements of a type that gpu-pool does not have.
    pub(crate) fn unknown(op: &'static str, dtype: candle_core::DType) -> Self {
        let wanted = "which gpu-pool does not have (f16, bf16, f32, f64, u8, u32, i32, i64)".into();
        Error::DType { op, what: "the tensor".into(), dtype, wanted }
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        // candle adds backtraces, paths and contexts around it.
        match e {
            candle_core::Error::WrappedContext { wrapped, context } => match wrapped.downcast::<Error>() {
                Ok(own) => *own,
                Err(wrapped) => Error::Candle(candle_core::Error::WrappedContext { wrapped, context }),
            },
            candle_core::Error::WithBacktrace { inner, backtrace } => match Error::from(*inner) {
                Error::Candle(inner) => {
                    Error::Candle(candle_core::Error::WithBacktrace { inner: Box::new(inner), backtrace })
                }
                own => own,
            },
            other => Error::Candle(other),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Candle(e) => e,
            // The only variant of candle's that gives its content back.
            own => {
                let context = own.to_string();
                candle_core::Error::WrappedContext { wrapped: Box::new(own), context }
            }
        }
    }
}

impl From<Error> for gpu_pool::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Pool(e) => e,
            other => gpu_pool::Error::custom(other),
        }
    }
}
