//! Sizes of a job's units.

use std::ops::Range;

/// Sizes of all units: the experts of each layer, then all other state.
///
/// Layers with the same load, placement and copies may count as one *class*, whose sizes are those of all its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    /// Experts of a class.
    pub experts: usize,
    /// Number of classes.
    pub classes: usize,
    /// Bytes of each unit's state.
    pub bytes: Vec<u64>,
    /// Bytes of each unit's gradient as it is sent; 0 if every node reduces it.
    pub gradients: Vec<u64>,
    /// Whether the optimizer's steps can be repeated bit for bit.
    pub replayable: bool,
    /// Whether one rank owns each unit that is no expert. If not, every node trains these units.
    pub have_owners: bool,
}

impl Units {
    /// Number of experts of all classes; they are the first units.
    pub fn num_experts(&self) -> usize {
        self.classes * self.experts
    }

    /// Units that are no expert.
    pub fn dense(&self) -> Range<usize> {
        self.num_experts()..self.bytes.len()
    }

    /// Units that every node has.
    pub fn everywhere(&self) -> Range<usize> {
        if self.have_owners { 0..0 } else { self.dense() }
    }

    /// Units with an owner that are no experts.
    pub fn owned(&self) -> Range<usize> {
        if self.have_owners { self.dense() } else { 0..0 }
    }

    /// Bytes that bring a replica of a unit to the next step: its gradient, or its state if steps cannot be repeated.
    pub fn step_bytes(&self, unit: usize) -> u64 {
        if self.replayable { self.gradients[unit] } else { self.bytes[unit] }
    }

    /// Total bytes of these units.
    pub fn sum(&self, units: impl Iterator<Item = usize>) -> u64 {
        units.map(|unit| self.bytes[unit]).sum()
    }

    /// Bytes of the experts of a class.
    pub fn of_class(&self, class: usize) -> Vec<i64> {
        self.bytes[class * self.experts..][..self.experts].iter().map(|&bytes| bytes as i64).collect()
    }
}
