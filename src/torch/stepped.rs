//! What the optimizers' ops hand to the arithmetic of a device.

use super::tensor::Tensor;

/// A checked parameter with its state, and the steps that it takes.
pub(super) struct Stepped<S> {
    /// The parameter, and the arrays of its optimizer that are there.
    pub(super) state: Vec<Tensor>,
    /// Contiguous, one for each step; none stands for zeros.
    pub(super) gradients: Vec<Option<Tensor>>,
    /// As many as gradients.
    pub(super) steps: Vec<S>,
}
