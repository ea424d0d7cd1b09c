//! What was promised, as ratios between two things measured in the same run.

/// Which side of the limit is good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) limit: Limit,
    /// `None`: one of the two was not measured.
    pub(crate) ratio: Option<f64>,
}

impl Target {
    pub(crate) fn new(name: impl Into<String>, limit: Limit, ours: Option<f64>, baseline: Option<f64>) -> Self {
        let ratio = match (ours, baseline) {
            (Some(ours), Some(baseline)) if baseline > 0.0 && ours.is_finite() => Some(ours / baseline),
            _ => None,
        };
        Self { name: name.into(), limit, ratio }
    }

    /// What was not measured is not met.
    pub(crate) fn is_met(&self) -> bool {
        match (self.ratio, self.limit) {
            (Some(ratio), Limit::AtMost(limit)) => ratio <= limit,
            (Some(ratio), Limit::AtLeast(limit)) => ratio >= limit,
            (None, _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_met_on_its_good_side_and_at_the_limit() {
        let met = |limit, ours| Target::new("t", limit, Some(ours), Some(2.0)).is_met();
        assert!(met(Limit::AtMost(1.5), 3.0) && met(Limit::AtMost(1.5), 2.0) && !met(Limit::AtMost(1.5), 3.1));
        assert!(met(Limit::AtLeast(0.5), 1.0) && met(Limit::AtLeast(0.5), 2.0) && !met(Limit::AtLeast(0.5), 0.9));
    }

    #[test]
    fn what_was_not_measured_is_not_met() {
        for (ours, baseline) in
            [(None, Some(1.0)), (Some(1.0), None), (Some(1.0), Some(0.0)), (Some(f64::NAN), Some(1.0))]
        {
            let target = Target::new("t", Limit::AtMost(10.0), ours, baseline);
            assert!(target.ratio.is_none() && !target.is_met());
        }
    }
}
