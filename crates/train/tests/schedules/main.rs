//! Pipeline schedules as data: presets, CSV, simulations, pictures.

mod picture;
mod presets;
mod pytorch;
mod random;
