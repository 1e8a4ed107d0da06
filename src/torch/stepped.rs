//! Input of the optimizers' steps, from the ops to the arithmetic of a device.

use super::tensor::Tensor;

/// A checked parameter with its state, and its steps.
pub(super) struct Stepped<S> {
    /// The parameter, and the existing arrays of its optimizer.
    pub(super) state: Vec<Tensor>,
    /// Weights in bfloat16 or float16 whose master is the parameter.
    pub(super) rounded: Option<Tensor>,
    /// Contiguous, one per step; none means zeros.
    pub(super) gradients: Vec<Option<Tensor>>,
    /// One per gradient.
    pub(super) steps: Vec<S>,
}
