//! Imbalance of the work under a placement: the busiest node relative to the mean node.

use super::Policy;
use super::flow::Flow;
use crate::ensure;
use crate::error::Result;

/// Returns the busiest node's load over the mean node's. 1 is perfect, `nodes` the worst; without any load it is 1.
///
/// `matrix` is `[nodes, experts]`: replicas of each expert on each node. `load` is `[experts]`: tokens, or any other
/// measure of work. Under [`Policy::Even`] a node bears each expert's load in proportion to its replicas: `Σ_e load[e]
/// · matrix[n, e] / Σ_n matrix[n, e]`. Under [`Policy::Balanced`] the holders share the load of an expert in the parts
/// that make the busiest node lightest. That result is exact within 1e-9, relatively, up to 2^26 (node, expert) pairs.
///
/// ```
/// use evermoe::dispatch::{Policy, imbalance};
/// // Two nodes; expert 0 is on both, expert 1 on node 1 alone: 3/2 and 3/2 + 1 against a mean of 2.
/// assert_eq!(imbalance(&[1, 0, 1, 1], &[3.0, 1.0], 2, Policy::Even)?, 1.25);
/// // With the best shares, 2 and 1 + 1.
/// assert_eq!(imbalance(&[1, 0, 1, 1], &[3.0, 1.0], 2, Policy::Balanced)?, 1.0);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for no nodes, wrong sizes, a load that is negative or not finite,
/// negative replicas, and an expert with load but without a replica.
pub fn imbalance(matrix: &[i64], load: &[f64], nodes: usize, policy: Policy) -> Result<f64> {
    let experts = load.len();
    ensure!(nodes > 0, "matrix: expected 1 node or more, got none");
    ensure!(
        nodes.checked_mul(experts) == Some(matrix.len()),
        "matrix: expected {nodes} nodes × {experts} experts, got {} numbers",
        matrix.len()
    );
    let total = check_load(load)?;
    if total == 0.0 {
        return Ok(1.0);
    }
    let parts: Vec<f64> = load.iter().map(|load| load / total).collect();
    let replicas = replicas(matrix, &parts)?;
    let busiest = match policy {
        Policy::Even => busiest_even(matrix, &parts, &replicas),
        Policy::Balanced => busiest_balanced(matrix, &parts, nodes),
    };
    // Rounding must not make the busiest lighter than the mean.
    Ok((busiest * nodes as f64).max(1.0))
}

/// Refuses invalid loads; returns their sum.
pub(crate) fn check_load(load: &[f64]) -> Result<f64> {
    if let Some(expert) = load.iter().position(|load| !(load.is_finite() && *load >= 0.0)) {
        ensure!(
            false,
            "load: expert {expert} has load {}; expected a finite number, 0 or more",
            load[expert]
        );
    }
    let total: f64 = load.iter().sum();
    ensure!(total.is_finite(), "load: the sum overflows; scale the loads down");
    Ok(total)
}

/// Replicas of each expert over all nodes.
fn replicas(matrix: &[i64], load: &[f64]) -> Result<Vec<i128>> {
    let experts = load.len();
    let mut replicas = vec![0_i128; experts];
    for (node, row) in matrix.chunks_exact(experts).enumerate() {
        for (expert, &count) in row.iter().enumerate().filter(|(_, count)| **count != 0) {
            ensure!(
                count >= 0,
                "matrix: expert {expert} has {count} replicas on node {node}; counts start at 0"
            );
            replicas[expert] += i128::from(count);
        }
    }
    let lost = (0..experts).find(|&expert| load[expert] > 0.0 && replicas[expert] == 0);
    if let Some(expert) = lost {
        ensure!(false, "matrix: expert {expert} has load and no replica on any node; place it on one first");
    }
    Ok(replicas)
}

/// The busiest node's load when every replica of an expert bears the same share.
fn busiest_even(matrix: &[i64], load: &[f64], replicas: &[i128]) -> f64 {
    let each: Vec<f64> = load.iter().zip(replicas).map(|(load, &count)| load / count.max(1) as f64).collect();
    let borne = |row: &[i64]| {
        let held = row.iter().zip(&each).filter(|(count, _)| **count > 0);
        held.map(|(&count, each)| count as f64 * each).sum()
    };
    matrix.chunks_exact(load.len()).map(borne).fold(0.0, f64::max)
}

/// The busiest node's load when the holders' shares are free: integer multiples of 2^-56 of the total load.
fn busiest_balanced(matrix: &[i64], load: &[f64], nodes: usize) -> f64 {
    let experts = load.len();
    let unit = (1_i64 << 56) as f64;
    let load: Vec<i64> = load.iter().map(|part| (part * unit).round() as i64).collect();
    let cells = 0..nodes * experts;
    let replicas: Vec<i64> = cells.map(|cell| matrix[cell % nodes * experts + cell / nodes]).collect();
    let mut flow = Flow::new(&replicas, experts, nodes);
    let busiest = flow.balance(&load, &vec![0; matrix.len()]);
    busiest as f64 / load.iter().sum::<i64>() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_replicas_on_a_node_are_a_larger_part() {
        assert_eq!(imbalance(&[3, 1], &[8.0], 2, Policy::Even).unwrap(), 1.5);
    }

    #[test]
    fn no_load_is_balanced() {
        assert_eq!(imbalance(&[0, 0], &[0.0], 2, Policy::Even).unwrap(), 1.0);
        assert_eq!(imbalance(&[], &[], 2, Policy::Even).unwrap(), 1.0);
    }

    #[test]
    fn tiny_and_huge_loads_count_like_others() {
        for load in [5e-324, 1e308] {
            assert_eq!(imbalance(&[1, 0], &[load], 2, Policy::Even).unwrap(), 2.0);
        }
    }

    #[test]
    fn errors_name_the_argument() {
        let message = |matrix: &[i64], load: &[f64], nodes| {
            imbalance(matrix, load, nodes, Policy::Even).unwrap_err().to_string()
        };
        assert!(message(&[], &[1.0], 0).starts_with("matrix: expected 1 node or more"));
        assert!(message(&[1], &[1.0], 2).starts_with("matrix: expected 2 nodes × 1 experts, got 1"));
        assert!(message(&[1, 1], &[1.0, f64::NAN], 1).contains("expert 1 has load NaN"));
        assert!(message(&[1, 1], &[-1.0, 1.0], 1).contains("expert 0 has load -1"));
        assert!(message(&[1, 1], &[f64::MAX; 2], 1).contains("the sum overflows"));
        assert!(message(&[1, 0], &[1.0, 1.0], 1).contains("expert 1 has load and no replica"));
        assert!(message(&[1, -1], &[1.0, 1.0], 1).contains("expert 1 has -1 replicas on node 0"));
    }
}
