//! What a run may do, and what it has done.

use std::fmt;

/// What may happen.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Scopes that fail.
    pub aborts: bool,
    /// Calls of the driver that fail.
    pub faults: bool,
    /// No other device and no other thread.
    pub alone: bool,
}

/// What has happened, so that one sees whether a run was worth its time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub steps: usize,
    pub allocated: usize,
    pub refused: usize,
    pub served_after_refusal: usize,
    pub checked: usize,
    pub from_peers: usize,
    pub thrown_away: usize,
    pub trimmed: usize,
    pub faults: usize,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.allocated += other.allocated;
        self.refused += other.refused;
        self.served_after_refusal += other.served_after_refusal;
        self.checked += other.checked;
        self.from_peers += other.from_peers;
        self.thrown_away += other.thrown_away;
        self.trimmed += other.trimmed;
        self.faults += other.faults;
    }

    /// A run that meets no limit and passes nothing on would prove nothing.
    pub fn assert_worth_it(&self, steps: usize, rules: Rules) {
        assert!(self.allocated > steps / 5 && self.checked > steps / 20, "{self}");
        assert!(self.refused > steps / 500 && (rules.faults || self.served_after_refusal > 0), "{self}");
        assert!(rules.alone || self.from_peers > steps / 100 && self.thrown_away > steps / 100, "{self}");
        assert!(!rules.faults || self.faults > 0, "{self}");
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            steps,
            allocated,
            refused,
            served_after_refusal,
            checked,
            from_peers,
            thrown_away,
            trimmed,
            faults,
        } = self;
        write!(
            f,
            "{steps} steps: {allocated} allocated, {refused} refused ({served_after_refusal} of those served once \
             something had been freed), {checked} checked, \
             {from_peers} taken from others, {thrown_away} freed on other threads, \
             {trimmed} trims, {faults} faults"
        )
    }
}
