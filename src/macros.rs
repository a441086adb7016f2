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

/// Methods of a builder that change it and return it: `pub fn name(self, value: T) { self.field = value; }`.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($Type:ty; $(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident ($this:ident $(, $($arg:ident)+: $Arg:ty)*) $body:block
    )+) => {
        impl $Type {$(
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
