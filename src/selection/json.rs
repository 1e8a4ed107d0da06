//! The ledger as text; numbers that a user may edit are checked.

use super::TokenLedger;
use super::ledger::VERSION;
use crate::ensure;
use crate::error::{Error, Result};

impl TokenLedger {
    /// Returns the ledger as JSON, to be saved with the checkpoint that it describes.
    pub fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Reads the JSON of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// [`Error::Invalid`] for other text, or an inconsistent ledger.
    pub fn from_json(text: &str) -> Result<Self> {
        let ledger: Self = serde_json::from_str(text)
            .map_err(|error| Error::invalid(format!("text: expected the JSON of a token ledger: {error}")))?;
        ensure!(ledger.version == VERSION, "text: expected layout {VERSION}, got {}", ledger.version);
        Self::new(ledger.layers, ledger.experts, ledger.experts_per_layer, ledger.max_lost_token_fraction)
            .map_err(|error| Error::invalid(format!("text: {error}")))?;
        ensure!(
            ledger.experts_per_layer <= ledger.experts,
            "text: experts_per_layer is {} of {} experts",
            ledger.experts_per_layer,
            ledger.experts
        );
        ledger.check_counts("text")?;
        Ok(ledger)
    }

    /// Refuses counts of another size or that contradict each other; `argument` is named in the message.
    pub(super) fn check_counts(&self, argument: &str) -> Result<()> {
        for (name, counts) in [
            ("seen", &self.seen),
            ("at_risk", &self.at_risk),
            ("lost", &self.lost),
            ("waiting", &self.waiting),
        ] {
            ensure!(
                counts.len() == self.layers * self.experts,
                "{argument}: {name} has {} numbers; expected {} layers × {} experts",
                counts.len(),
                self.layers,
                self.experts
            );
            ensure!(counts.iter().all(|&count| count >= 0), "{argument}: {name} has a negative count");
        }
        for (cell, &seen) in self.seen.iter().enumerate() {
            let gone = self.at_risk[cell].checked_add(self.lost[cell]);
            ensure!(
                gone.is_some_and(|gone| gone <= seen) && (self.waiting[cell] == 0 || self.at_risk[cell] > 0),
                "{argument}: layer {} expert {} has seen {seen} tokens, fewer than at risk and lost, or waits without tokens at risk",
                cell / self.experts,
                cell % self.experts
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_that_is_no_ledger_is_refused() {
        let mut ledger = TokenLedger::new(2, 2, 1, 0.1).unwrap();
        ledger.add(&[6, 2, 0, 10]).unwrap();
        ledger.copied(&[vec![0], vec![]]).unwrap();
        ledger.add(&[2, 0, 0, 0]).unwrap();
        let text = ledger.to_json();
        assert_eq!(TokenLedger::from_json(&text).unwrap(), ledger);
        let message = |old: &str, new: &str| {
            assert!(text.contains(old), "{text}");
            TokenLedger::from_json(&text.replace(old, new)).unwrap_err().to_string()
        };
        assert!(message("\"layers\":2", "\"layers\":3").contains("seen has 4 numbers"));
        assert!(message("\"layers\":2", "\"layers\":9999999999").contains("more than 2^24"));
        assert!(message("\"at_risk\":[2", "\"at_risk\":[9").contains("layer 0 expert 0 has seen 8"));
        assert!(message("\"at_risk\":[2", "\"at_risk\":[-2").contains("at_risk has a negative"));
        assert!(message("\"lost\":[0", "\"lost\":[9223372036854775807").contains("layer 0 expert 0"));
        assert!(message("\"waiting\":[0,1,0", "\"waiting\":[0,1,7").contains("waits without tokens at risk"));
        assert!(message("ledger\":1", "ledger\":2").contains("expected layout 1, got 2"));
        assert!(message("0.1", "1e999").contains("JSON of a token ledger"));
        assert!(message("0.1", "2.5").contains("max_lost_token_fraction"));
        assert!(message("per_layer\":1", "per_layer\":3").contains("3 of 2 experts"));
        assert!(message("\"step\"", "\"stop\"").contains("unknown field"));
    }
}
