//! The tables of one rank: tokens to send and to receive, for every expert.

use super::Policy;
use super::balanced::split_balanced;
use super::expert::{MAX_SCALE, Route, split_expert};
use crate::ensure;
use crate::error::Result;

/// Tokens that one rank sends and receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// `[experts, ranks]`: tokens of each expert that this rank sends to each rank.
    pub send: Vec<i64>,
    /// `[ranks, experts]`: tokens of each expert that this rank receives from each rank.
    pub receive: Vec<i64>,
}

/// Splits the tokens of every expert over the ranks that hold it and returns the row and column of `rank`.
///
/// `tokens` is `[experts, ranks]`: tokens of each expert on each rank. `matrix` is `[ranks, experts]`: replicas of each
/// expert on each rank.
///
/// [`Policy::Even`]: tokens stay on their rank as far as it has room; the rest goes to the others in proportion to
/// their remaining room (see [`split_expert`]). [`Policy::Balanced`]: the busiest rank computes as few tokens as any
/// split allows. Within that, every rank starts with its own tokens and gives them away only for others that find no
/// room.
///
/// ```
/// use evermoe::dispatch::{Policy, split_tokens};
/// // Two ranks, one expert with a replica on each: of 4 tokens on rank 0 two stay, two go to rank 1.
/// let split = split_tokens(&[4, 0], &[1, 1], 1, 2, 0, Policy::Even)?;
/// assert_eq!(split.send, [2, 2]);
/// assert_eq!(split.receive, [2, 0]);
/// // Another expert has 2 tokens and only rank 1: balanced, rank 0 keeps 3 and rank 1 computes 1 + 2.
/// let split = split_tokens(&[4, 0, 2, 0], &[1, 0, 1, 1], 2, 2, 0, Policy::Balanced)?;
/// assert_eq!(split.send, [3, 1, 0, 2]);
/// # Ok::<(), evermoe::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for wrong sizes, negative numbers, an expert with tokens but
/// without a replica, and numbers too large for an exact split.
pub fn split_tokens(
    tokens: &[i64],
    matrix: &[i64],
    experts: usize,
    ranks: usize,
    rank: usize,
    policy: Policy,
) -> Result<Split> {
    check_sizes(tokens, matrix, experts, ranks, rank)?;
    let mut replicas = vec![0; matrix.len()];
    for (cell, replicas) in replicas.iter_mut().enumerate() {
        *replicas = matrix[cell % ranks * experts + cell / ranks];
    }
    check_counts(tokens, &replicas, ranks)?;
    let mut split = Split { send: vec![0; tokens.len()], receive: vec![0; tokens.len()] };
    if experts == 0 {
        return Ok(split);
    }
    let mut visit = |expert: usize, Route { source, destination, tokens }| {
        if source == rank {
            split.send[expert * ranks + destination] = tokens;
        }
        if destination == rank {
            split.receive[source * experts + expert] = tokens;
        }
    };
    match policy {
        Policy::Even => {
            let pairs = tokens.chunks_exact(ranks).zip(replicas.chunks_exact(ranks));
            for (expert, (tokens, replicas)) in pairs.enumerate() {
                split_expert(tokens, replicas, |route| visit(expert, route));
            }
        }
        Policy::Balanced => split_balanced(tokens, &replicas, ranks, visit),
    }
    Ok(split)
}

fn check_sizes(tokens: &[i64], matrix: &[i64], experts: usize, ranks: usize, rank: usize) -> Result<()> {
    let size = experts.checked_mul(ranks);
    ensure!(
        size == Some(tokens.len()),
        "tokens: expected {experts} experts × {ranks} ranks, got {} numbers",
        tokens.len()
    );
    ensure!(
        size == Some(matrix.len()),
        "matrix: expected {ranks} ranks × {experts} experts, got {} numbers",
        matrix.len()
    );
    ensure!(
        rank < ranks,
        "rank: expected 0 to {} as there are {ranks} ranks, got {rank}",
        ranks.saturating_sub(1)
    );
    Ok(())
}

/// Refuses counts that cannot be split, naming the expert. Both are `[experts, ranks]`.
fn check_counts(tokens: &[i64], replicas: &[i64], ranks: usize) -> Result<()> {
    let mut all = 0_i128;
    for (expert, (tokens, replicas)) in
        tokens.chunks_exact(ranks).zip(replicas.chunks_exact(ranks)).enumerate()
    {
        all += check_expert(expert, tokens, replicas)?;
    }
    ensure!(all <= MAX_SCALE, "tokens: all experts have {all}, more than 2^61; split the batch");
    Ok(())
}

/// Returns the tokens of the expert.
fn check_expert(expert: usize, tokens: &[i64], replicas: &[i64]) -> Result<i128> {
    if let Some(rank) = tokens.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "tokens: expert {expert} has {} tokens on rank {rank}; counts start at 0",
            tokens[rank]
        );
    }
    if let Some(rank) = replicas.iter().position(|&count| count < 0) {
        ensure!(
            false,
            "matrix: expert {expert} has {} replicas on rank {rank}; counts start at 0",
            replicas[rank]
        );
    }
    let total: i128 = tokens.iter().map(|&count| i128::from(count)).sum();
    let held: i128 = replicas.iter().map(|&count| i128::from(count)).sum();
    ensure!(
        total == 0 || held > 0,
        "matrix: expert {expert} has {total} tokens and no replica on any rank; place it on one first"
    );
    let fits = total.checked_mul(held).is_some_and(|scale| scale <= MAX_SCALE);
    ensure!(
        fits,
        "tokens: expert {expert} has {total} tokens × {held} replicas, more than 2^61; split the batch"
    );
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_without_tokens_needs_no_replica() {
        for policy in [Policy::Even, Policy::Balanced] {
            let split = split_tokens(&[0, 0], &[0, 0], 1, 2, 1, policy).unwrap();
            assert_eq!(split, Split { send: vec![0, 0], receive: vec![0, 0] });
        }
    }

    #[test]
    fn errors_name_the_expert() {
        let message = |tokens: &[i64], matrix: &[i64]| {
            split_tokens(tokens, matrix, 2, 1, 0, Policy::Even).unwrap_err().to_string()
        };
        assert!(message(&[1, 7], &[1, 0]).contains("expert 1 has 7 tokens and no replica"));
        assert!(message(&[1, -7], &[1, 1]).contains("expert 1 has -7 tokens on rank 0"));
        assert!(message(&[1, 7], &[1, -1]).contains("expert 1 has -1 replicas on rank 0"));
        assert!(message(&[1, i64::MAX], &[1, 2]).contains("more than 2^61"));
        assert!(message(&[1 << 61, 1], &[1, 1]).contains("more than 2^61"));
        assert!(message(&[1], &[1, 2]).starts_with("tokens: expected 2 experts × 1 ranks"));
    }
}
