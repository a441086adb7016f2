//! The programs of the book's page are doctests.

macro_rules! pages {
    ($($name:ident: $path:literal),+ $(,)?) => {
        $(#[cfg(doctest)] #[doc = include_str!(concat!("../../../", $path))] struct $name;)+
    };
}

pages! {
    Candle: "docs/src/guide/candle.md",
}
