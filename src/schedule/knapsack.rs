//! 0/1 knapsack by branch and bound: BAFT's choice of uncut units for a window.

/// An item of the knapsack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Weight of the item, in seconds.
    pub seconds: f64,
    /// Value of the item, in bytes.
    pub bytes: u64,
}

/// Equal items.
#[derive(Clone, Debug)]
pub(super) struct Class {
    pub(super) item: Item,
    /// Number of items left.
    pub(super) count: usize,
}

/// Maximum number of branches; models have a few distinct sizes, which need far fewer.
pub(super) const MAX_BRANCHES: usize = 1 << 12;

/// Positions, ascending, of the items that together have the most bytes within `seconds`.
///
/// Exact unless more than 4096 branches remain, which takes dozens of distinct sizes. Then it is the best choice found
/// so far, extended by everything that still fits.
///
/// ```
/// use evermoe::schedule::{Item, best_subset};
/// let items = [(3.0, 30), (4.0, 40), (5.0, 51)].map(|(seconds, bytes)| Item { seconds, bytes });
/// assert_eq!(best_subset(&items, 7.5), [0, 1]); // 70 bytes in 7 seconds; 51 alone would leave 2.5 seconds
/// assert_eq!(best_subset(&items, 6.0), [2]);
/// ```
pub fn best_subset(items: &[Item], seconds: f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|&a, &b| denser(&items[a], &items[b]).then(a.cmp(&b)));
    let equal = order.chunk_by(|&a, &b| items[a] == items[b]);
    let members: Vec<&[usize]> = equal.collect();
    let classes: Vec<Class> =
        members.iter().map(|members| Class { item: items[members[0]], count: members.len() }).collect();
    let taken = fill(&classes, seconds, 0.0, MAX_BRANCHES);
    let mut chosen: Vec<usize> =
        taken.into_iter().flat_map(|(place, count)| members[place][..count].iter().copied()).collect();
    chosen.sort_unstable();
    chosen
}

/// Order of classes: most bytes per second first, then larger items.
pub(super) fn denser(a: &Item, b: &Item) -> std::cmp::Ordering {
    let density = |item: &Item| item.bytes as f64 / item.seconds;
    density(b).total_cmp(&density(a)).then(b.bytes.cmp(&a.bytes)).then(a.seconds.total_cmp(&b.seconds))
}

/// Positions of classes, with the number of items of each. The classes are in the order of [`denser`]; `smallest` is
/// the least of their seconds.
pub(super) fn fill(classes: &[Class], seconds: f64, smallest: f64, branches: usize) -> Vec<(usize, usize)> {
    let mut search = Search { classes, taken: Vec::new(), best: Vec::new(), most: 0, branches };
    search.descend(seconds, 0);
    let mut best = search.best;
    let used: f64 = classes.iter().zip(&best).map(|(class, &count)| class.item.seconds * count as f64).sum();
    let mut left = seconds - used;
    for (place, class) in classes.iter().enumerate() {
        if left < smallest {
            break;
        }
        best.resize(best.len().max(place + 1), 0);
        let more = class.fitting(left).min(class.count - best[place]);
        best[place] += more;
        left -= more as f64 * class.item.seconds;
    }
    best.into_iter().enumerate().filter(|(_, count)| *count > 0).collect()
}

impl Class {
    /// Number of items that fit into `seconds`.
    fn fitting(&self, seconds: f64) -> usize {
        let mut count = if self.item.seconds > 0.0 {
            ((seconds / self.item.seconds) as usize).min(self.count)
        } else {
            self.count
        };
        while count > 0 && count as f64 * self.item.seconds > seconds {
            count -= 1;
        }
        count
    }
}

struct Search<'a> {
    classes: &'a [Class],
    taken: Vec<usize>,
    best: Vec<usize>,
    most: u64,
    branches: usize,
}

impl Search<'_> {
    /// Tries the classes from `taken.len()` on, most items first, while the rest can still beat the best.
    fn descend(&mut self, seconds: f64, bytes: u64) {
        if bytes > self.most {
            self.most = bytes;
            self.best.clone_from(&self.taken);
        }
        let Some(class) = self.classes.get(self.taken.len()) else { return };
        // None of the following classes has more bytes per second.
        let bound = bytes as f64 + seconds * (class.item.bytes as f64 / class.item.seconds);
        // Slightly above, as the bound is rounded.
        if self.branches == 0 || bound * (1.0 + 1e-12) < self.most as f64 + 1.0 {
            return;
        }
        for count in (0..=class.fitting(seconds)).rev() {
            if self.branches == 0 {
                return;
            }
            self.branches -= 1;
            self.taken.push(count);
            let used = count as f64 * class.item.seconds;
            self.descend(
                seconds - used,
                bytes.saturating_add((count as u64).saturating_mul(class.item.bytes)),
            );
            self.taken.pop();
        }
    }
}
