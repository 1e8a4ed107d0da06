//! Nodes that fail together.

use crate::ensure;
use crate::error::Result;

/// Returns the failure domain of each node: `domains[i]` is domain i, and each unlisted node is a further domain of its
/// own.
pub(crate) fn domain_of(nodes: usize, domains: &[Vec<usize>]) -> Result<Vec<usize>> {
    let mut found = vec![None; nodes];
    for (domain, members) in domains.iter().enumerate() {
        ensure!(!members.is_empty(), "domains: domain {domain} is empty; leave it out");
        for &node in members {
            ensure!(node < nodes, "domains: domain {domain} names node {node}; there are {nodes} nodes");
            if let Some(other) = found[node].replace(domain) {
                ensure!(
                    false,
                    "domains: node {node} is in domain {other} and in domain {domain}; list each node once"
                );
            }
        }
    }
    let mut next = domains.len();
    let mut alone = || {
        next += 1;
        next - 1
    };
    Ok(found.into_iter().map(|domain| domain.unwrap_or_else(&mut alone)).collect())
}

/// Returns the nodes of each failure domain, ascending; `domain` is the domain of each node, numbered from 0.
pub(super) fn nodes_of(domain: &[usize]) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); domain.iter().max().map_or(0, |last| last + 1)];
    for (node, &domain) in domain.iter().enumerate() {
        found[domain].push(node);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_in_no_domain_are_their_own() {
        assert_eq!(domain_of(5, &[vec![1, 3]]).unwrap(), [1, 0, 2, 0, 3]);
        assert_eq!(domain_of(2, &[]).unwrap(), [0, 1]);
    }

    #[test]
    fn errors_name_the_domain() {
        let message = |domains: &[Vec<usize>]| domain_of(3, domains).unwrap_err().to_string();
        assert!(message(&[vec![0], vec![]]).starts_with("domains: domain 1 is empty"));
        assert!(message(&[vec![3]]).starts_with("domains: domain 0 names node 3; there are 3 nodes"));
        assert!(message(&[vec![0], vec![1, 0]]).contains("node 0 is in domain 0 and in domain 1"));
        assert!(message(&[vec![1, 1]]).contains("node 1 is in domain 0 and in domain 0"));
    }
}
