LARGEST = 1_000_000
def catalogue(size, seed): raise NotImplementedError
def generated_tasks(*a,**k): raise NotImplementedError
