//! Machine files in TOML: reads and writes a [`Topology`], one table for each part of the model.

use super::Topology;
use gpu_pool::{
    Error, Result,
    extend::{ErrorInternals, OpSite},
};
use std::{fs, path::Path};

impl Topology {
    /// Reads a machine from TOML. `examples/data/machines/` has some. Only with feature `topology-files`.
    ///
    /// ```
    /// # use gpu_pool_lab::Topology;
    /// let machine: Topology = Topology::parse(r#"
    ///     name = "two cards that share a slot"
    ///     [[devices]]
    ///     name = "left"
    ///     up = { latency_us = 3, gbps = 12, uses = [{ port = "slot", gbps = 13 }] }
    ///     [[devices]]
    ///     name = "right"
    ///     up = { latency_us = 3, gbps = 12, uses = [{ port = "slot", gbps = 13 }] }
    /// "#)?;
    /// assert_eq!(machine.len(), 2);
    /// assert!(machine.peers(0).is_empty());
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the line that cannot be read, or the part of the machine that is invalid.
    #[track_caller]
    pub fn parse(text: &str) -> Result<Self> {
        let _here = OpSite::here("Topology::parse");
        let machine: Topology = toml::from_str(text).map_err(|e| Error::invalid("topology", e))?;
        machine.validate()?;
        Ok(machine)
    }

    /// [`parse`](Self::parse)s a file. Only with feature `topology-files`.
    ///
    /// # Errors
    /// As [`parse`](Self::parse); also if the file cannot be read. The error names the file.
    #[track_caller]
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let (path, _here) = (path.as_ref(), OpSite::here("Topology::from_file"));
        let named = |e: &dyn std::fmt::Display| Error::invalid("topology", format_args!("{}: {e}", path.display()));
        let text = fs::read_to_string(path).map_err(|e| named(&e))?;
        Self::parse(&text).map_err(|e| match e {
            Error::InvalidArgument { why, .. } => named(&why),
            other => other,
        })
    }

    /// The machine as TOML, which [`parse`](Self::parse) reads. Only with feature `topology-files`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if [`validate`](Self::validate) refuses the machine, or if TOML cannot express a
    /// number (memory of more than `i64::MAX` bytes).
    #[track_caller]
    pub fn to_toml(&self) -> Result<String> {
        let _here = OpSite::here("Topology::to_toml");
        self.validate()?;
        toml::to_string(self).map_err(|e| Error::invalid("topology", e))
    }
}
