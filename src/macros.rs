//! Macros that all rooms and the crates above use: refusals in one line, `Debug` without a derive, setters.

#[doc(hidden)]
#[macro_export]
macro_rules! fail_if {
    ($refused:expr, $error:expr) => {
        if $refused {
            return Err($error);
        }
    };
}

/// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) of an operation, with a formatted reason, if the
/// condition holds.
#[doc(hidden)]
#[macro_export]
macro_rules! invalid_if {
    ($refused:expr, $op:expr, $($why:tt)+) => {
        if $refused {
            return Err(Error::invalid($op, format_args!($($why)+)));
        }
    };
}

/// Calls a macro with every start of a list: `each_start! { m [] (a) (b) }` is `m! { (a) }` and `m! { (a) (b) }`.
#[doc(hidden)]
#[macro_export]
macro_rules! each_start {
    ($each:ident [$($done:tt)*]) => {};
    ($each:ident [$($done:tt)*] $next:tt $($rest:tt)*) => {
        $each! { $($done)* $next }
        $crate::each_start! { $each [$($done)* $next] $($rest)* }
    };
}

/// `Debug` where a derive would show too much: `debug_as!(Type<T> [T: Bound], |self| field = value, ..)`. The dots say
/// that there are further fields. A format in place of the fields writes a text.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_as {
    ($Type:ident $(<$($part:tt),*>)? $([$($bounds:tt)*])?, |$this:ident| $($shown:tt)+) => {
        impl $(<$($bounds)*>)? ::std::fmt::Debug for $Type $(<$($part),*>)? {
            fn fmt(&$this, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                $crate::debug_as!(@ f $Type $($shown)+)
            }
        }
    };
    (@ $f:ident $Type:ident $text:literal $($args:tt)*) => { write!($f, $text $($args)*) };
    (@ $f:ident $Type:ident $($name:ident = $value:expr),+) => {
        $f.debug_struct(stringify!($Type))$(.field(stringify!($name), &$value))+.finish()
    };
    (@ $f:ident $Type:ident $($name:ident = $value:expr,)* ..) => {
        $f.debug_struct(stringify!($Type))$(.field(stringify!($name), &$value))*.finish_non_exhaustive()
    };
}

/// `Display` by an expression: `display_as!(Type<T> [T: Bound], |self, f| write!(f, ..))`.
#[doc(hidden)]
#[macro_export]
macro_rules! display_as {
    ($Type:ident $(<$($part:tt),*>)? $([$($bounds:tt)*])?, |$this:ident, $f:ident| $shown:expr) => {
        impl $(<$($bounds)*>)? ::std::fmt::Display for $Type $(<$($part),*>)? {
            fn fmt(&$this, $f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                $shown
            }
        }
    };
}

/// The symbol of a kernel that there is of all element types: `typed_name!(dtype, "fill")` is `fill_f32`, and so on.
/// The caller imports `DType`.
#[doc(hidden)]
#[macro_export]
macro_rules! typed_name {
    ($dtype:expr, $name:literal) => {
        match $dtype {
            DType::F32 => concat!($name, "_f32"),
            DType::F64 => concat!($name, "_f64"),
            DType::F16 => concat!($name, "_f16"),
            DType::BF16 => concat!($name, "_bf16"),
            DType::I8 => concat!($name, "_i8"),
            DType::U8 => concat!($name, "_u8"),
            DType::I32 => concat!($name, "_i32"),
            DType::U32 => concat!($name, "_u32"),
            DType::I64 => concat!($name, "_i64"),
            DType::U64 => concat!($name, "_u64"),
            #[allow(unreachable_patterns, reason = "other crates must match them")]
            _ => unreachable!("the names are of all types"),
        }
    };
}

/// Methods of a builder that change it and return it: `pub fn name(self, value: T) { self.field = value; }`. A generic
/// type has its parameters behind it: `Type<T> [T: Bound];`.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($Type:ty $([$($bounds:tt)*])?; $(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident ($this:ident $(, $($arg:ident)+: $Arg:ty)*) $body:block
    )+) => {
        impl $(<$($bounds)*>)? $Type {$(
            $(#[$meta])*
            $vis fn $name(mut $this $(, $($arg)+: $Arg)*) -> Self {
                $body
                $this
            }
        )+}
    };
}

/// `Default` of types whose `new` takes nothing.
macro_rules! default_is_new {
    ($($Type:ident $(<$part:ident>)? $([$($bounds:tt)*])?),*) => {$(
        impl $(<$($bounds)*>)? Default for $Type $(<$part>)? {
            fn default() -> Self {
                Self::new()
            }
        }
    )*};
}
